// Two answers side by side: words that differ are marked, and each token of the first gets its KL.

const MOST_WORDS = 1500;  // of an answer that are compared word by word

function words(text) {  // words and signs, each with the space after it
  return text.match(/^\s+|[\p{L}\p{N}_]+\s*|[^\s\p{L}\p{N}_]\s*/gu) || [];
}

function differences(one, two) {  // for each of two word lists: which words the other does not have there
  [one, two] = [one, two].map((list) => list.map((word) => word.trim()));
  let start = 0, end = 0;
  const most = Math.min(one.length, two.length);
  while (start < most && one[start] === two[start]) start++;
  while (end < most - start && one[one.length - 1 - end] === two[two.length - 1 - end]) end++;
  const a = one.slice(start, one.length - end), b = two.slice(start, two.length - end);
  const marks = [one.map((_, index) => index >= start && index < one.length - end), two.map((_, index) => index >= start && index < two.length - end)];
  if (a.length > MOST_WORDS || b.length > MOST_WORDS) return marks;
  const width = b.length + 1, longest = new Uint16Array((a.length + 1) * width);  // common subsequences
  for (let i = a.length - 1; i >= 0; i--) {
    for (let j = b.length - 1; j >= 0; j--) {
      longest[i * width + j] = a[i] === b[j] ? longest[(i + 1) * width + j + 1] + 1 : Math.max(longest[(i + 1) * width + j], longest[i * width + j + 1]);
    }
  }
  for (let i = 0, j = 0; i < a.length && j < b.length;) {
    if (a[i] === b[j]) { marks[0][start + i++] = false; marks[1][start + j++] = false; }
    else if (longest[(i + 1) * width + j] >= longest[i * width + j + 1]) i++;
    else j++;
  }
  return marks;
}

function marked(list, marks) {  // nodes: runs of words that differ are in <mark>
  const nodes = [];
  let run = "", on = false;
  const close = () => { if (run) nodes.push(on ? el("mark", null, run) : run); run = ""; };
  list.forEach((word, index) => {
    if (marks[index] !== on) { close(); on = marks[index]; }
    run += word;
  });
  close();
  return nodes;
}

async function scoreTokens(body, tokens, signal) {  // KL of each token of the first answer
  const ids = tokens.map((token) => token.id);
  const result = await (await call("attar/compare", {...body, token_ids: ids}, signal)).json();
  result.tokens.forEach((row, index) => {
    tokens[index].kl = row.kl;
    tokens[index].otherLogprob = row.other_logprob;
  });
  return result;
}
