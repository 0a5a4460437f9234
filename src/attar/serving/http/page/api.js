// Calls of the server's API. The key is kept in sessionStorage alone, and sent to this server alone: every
// address is relative to the page.

class Refusal extends Error {  // an error answer; status 0: no answer at all
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

const KEY = "attar.key";

function readKey() {
  try { return sessionStorage.getItem(KEY) || ""; } catch { return ""; }
}

function keepKey(value) {
  try { sessionStorage.setItem(KEY, value); } catch { /* a browser without storage asks again */ }
}

async function call(path, body, signal) {
  const headers = body ? {"Content-Type": "application/json"} : {};
  if (readKey()) headers.Authorization = `Bearer ${readKey()}`;
  let response;
  try {
    response = await fetch(path, {
      method: body ? "POST" : "GET", headers, body: body && JSON.stringify(body), signal,
      cache: "no-store", credentials: "omit", redirect: "error",
    });
  } catch (error) {
    if (signal && signal.aborted) throw error;
    throw new Refusal(0, "The server does not answer.");
  }
  if (response.ok) return response;
  let message = `The server answered with ${response.status}.`;
  try { message = (await response.json()).error.message; } catch { /* not JSON */ }
  throw new Refusal(response.status, message);
}

async function* stream(path, body, signal) {  // the chunks of a streamed answer
  const response = await call(path, {...body, stream: true, stream_options: {include_usage: true}}, signal);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const {value, done} = await reader.read();
      if (done) break;
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        if (part === "data: [DONE]") return;
        if (!part.startsWith("data: ")) continue;
        const chunk = JSON.parse(part.slice(6));
        if (chunk.error) throw new Refusal(500, chunk.error.message);
        yield chunk;
      }
    }
  } catch (error) {
    if (error instanceof Refusal || (signal && signal.aborted)) throw error;
  } finally {
    reader.cancel().catch(() => {});
  }
  throw new Refusal(0, "The connection broke off before the answer was complete.");
}

function tokensOf(choice) {  // [{text, id, proposer, logprob, top}] of a chunk of either endpoint
  const ids = choice.attar ? choice.attar.token_ids : [], proposers = choice.attar ? choice.attar.proposers : [];
  const scores = choice.logprobs || {};
  const rows = scores.content
    ? scores.content.map((row) => ({bytes: row.bytes, logprob: row.logprob, top: row.top_logprobs.map((one) => [one.token, one.logprob])}))
    : (scores.tokens || []).map((name, index) => ({
      bytes: namedBytes(name), logprob: scores.token_logprobs[index],
      top: Object.entries((scores.top_logprobs || [])[index] || {}).sort((one, two) => two[1] - one[1]).slice(0, 5),
    }));
  return rows.map((row, index) => ({...row, id: ids[index], proposer: proposers[index] || "target"}));
}

function namedBytes(name) {  // "bytes:\xe2\x80" stands for a part of a character
  const parts = name.startsWith("bytes:") ? name.match(/\\x[0-9a-f]{2}/g) : null;
  return parts ? parts.map((part) => parseInt(part.slice(2), 16)) : [...new TextEncoder().encode(name)];
}
