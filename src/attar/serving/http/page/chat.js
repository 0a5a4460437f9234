// The open chat: its messages as nodes, and the requests that make them.
//
// message {role, content, thoughts, stats, stopped, failed, other: {content, stats}, divergence}; tokens are
// kept beside it until the page is left, for they are larger than the text.

const EXAMPLES = {
  chat: ["Explain in two sentences why the sky is blue.", "Write a short story about a lighthouse keeper."],
  text: ["def fibonacci(n):", "Once upon a time, "],
};
let chat = newChat(), running = null, state = null, atEnd = true;
const tokens = new WeakMap(), rows = new WeakMap();

function showChat() {
  $("log").replaceChildren(...(chat.messages.length ? chat.messages.map((message) => rows.get(message) || messageNode(message)) : [emptyNode()]));
  $("system").value = chat.system;
  atEnd = chat.messages.length > 0;
  $("log").scrollTop = atEnd ? $("log").scrollHeight : 0;
}

function emptyNode() {
  const text = !state ? "" : state.chat
    ? "Write a message; the model answers."
    : "This model has no chat template: it continues the text that you write.";
  return el("div", {class: "empty"}, el("h2", null, state ? state.model : "attar"), el("p", null, text), ...(state ? [examples(), callExample()] : []));
}

function examples() {  // prompts that a press puts into the composer
  const buttons = EXAMPLES[state.chat ? "chat" : "text"].map((text) => el("button", {type: "button", onclick: () => { $("prompt").value = text; $("prompt").focus(); }}, text));
  return el("div", {class: "examples", role: "group", "aria-label": "Example prompts"}, buttons);
}

function callExample() {  // this server's own address and model, as a command line
  const address = new URL(state.chat ? "v1/chat/completions" : "v1/completions", location.href).href;
  const input = state.chat ? {messages: [{role: "user", content: "Hello"}]} : {prompt: EXAMPLES.text[0], max_tokens: 64};
  const body = JSON.stringify({model: state.model, ...input}).replace(/'/g, "'\\''");
  const key = document.body.dataset.key === undefined ? [] : ["-H 'Authorization: Bearer YOUR_KEY'"];
  const parts = [`curl ${address}`, ...key, "-H 'Content-Type: application/json'", `-d '${body}'`];
  return el("div", null, el("h3", null, "The same from a program"), codeNode(parts.join(" \\\n  "), "sh"));
}

function messageNode(message) {
  const node = el("article", {class: `${message.role}${message.other ? " pair" : ""}`});
  rows.set(message, node);
  fillMessage(message, node);
  return node;
}

function fillMessage(message, node = rows.get(message)) {
  const live = running && running.message === message;
  node.classList.toggle("busy", Boolean(live));
  const who = message.role === "user" ? "You" : message.other ? "Two models" : state ? state.model : "Model";
  if (!node.body) node.append(el("h3", null, who), node.body = el("div"), node.foot = el("div", {class: "tools"}));
  if (message.role === "user") node.body.replaceChildren(el("div", {class: "content"}, message.content));
  else if (message.other) fillPair(message, node, live);
  else fillAnswer(message, node.body);
  if (!live) node.foot.replaceChildren(...messageTools(message, node));
}

function fillAnswer(message, body) {
  if (message.thoughts) {
    if (!body.thoughts) body.append(el("details", {class: "thoughts"}, el("summary", null, "Thoughts"), body.thoughts = el("div")));
    body.thoughts.textContent = message.thoughts;
  }
  if (!body.content) body.append(body.content = el("div", {class: "content"}));
  if (state && !state.chat) { body.content.className = "content plain"; body.content.textContent = message.content; }
  else renderMarkdown(body.content, message.content);
  if (message.failed && !body.failure) body.append(body.failure = el("p", {class: "failed"}, message.failed));
}

function fillPair(message, node, live) {
  const lists = [words(message.content), words(message.other.content)];
  const marks = live ? [[], []] : differences(...lists);
  const box = (title, list, flags, stats) => el("section", {class: "answer", "aria-label": title},
    el("h3", null, title), el("div", {class: "plain"}, live ? list.join("") : marked(list, flags)), el("p", {class: "meta"}, statsText(stats)));
  node.body.replaceChildren(el("div", {class: "answers"},
    box(state ? state.model : "first", lists[0], marks[0], message.stats), box(message.other.model, lists[1], marks[1], message.other.stats)));
  if (live) return;
  const same = message.content === message.other.content;
  node.body.append(el("p", {class: "note"}, same ? "Both answers are the same. " : "Marked: words that the other answer does not have there. ", message.divergence || ""));
  if (message.failed) node.body.append(el("p", {class: "failed"}, message.failed));
}

function messageTools(message, node) {
  const button = (label, act, more) => el("button", {type: "button", class: "quiet", onclick: act, ...more}, label);
  if (message.role === "user") return [button("Edit", () => editMessage(message, node))];
  const list = tokens.get(message);
  const toggle = button("Tokens", () => {
    const open = toggle.getAttribute("aria-pressed") !== "true";
    toggle.setAttribute("aria-pressed", open);
    if (node.view) node.view.remove();
    node.view = open ? tokenView(list) : null;
    if (open) node.append(node.view), node.view.scrollIntoView({block: "nearest"});
  }, {"aria-pressed": "false", title: "the answer token by token: who proposed each, and how probable it was"});
  const meta = message.other ? "" : statsText(message.stats, list) + (message.stopped ? " · stopped" : "");
  return [el("span", {class: "meta", title: STATS}, meta), button("Copy", () => copy(message.content)), button("Regenerate", () => regenerate(message)), list && list.length ? toggle : null].filter(Boolean);
}

const STATS = "A token is a piece of a word. From drafts: the share that a fast proposer guessed, and the model accepted.";

function statsText(stats, list = []) {
  if (!stats || !stats.tokens) return "";
  const parts = [`${stats.tokens} tokens`];
  if (stats.rate) parts.push(`${stats.rate.toFixed(stats.rate < 10 ? 1 : 0)} tokens/s`);
  if (stats.first !== undefined) parts.push(`first after ${stats.first.toFixed(2)} s`);
  if (draftedShare(list)) parts.push(`${percent(draftedShare(list))} from drafts`);
  return parts.join(" · ");
}

function editMessage(message, node) {
  if (running) return;
  const area = el("textarea", {rows: "3", "aria-label": "Edit the message"});
  area.value = message.content;
  const close = () => { node.body.textContent = ""; fillMessage(message, node); };
  const send = () => { chat.messages.length = chat.messages.indexOf(message); ask(area.value); };
  area.addEventListener("keydown", (event) => { if (event.key === "Escape") { event.stopPropagation(); close(); } });
  node.body.replaceChildren(area);
  node.foot.replaceChildren(el("button", {type: "button", onclick: close}, "Cancel"), el("button", {type: "button", class: "main", onclick: send}, "Send again"));
  area.focus();
}

function regenerate(message) {
  if (running) return;
  chat.messages.length = chat.messages.indexOf(message);
  answer();
}

function ask(text) {
  if (running || !text.trim()) return false;
  chat.messages.push({role: "user", content: state && !state.chat ? text : text.trim()});
  answer();
  return true;
}

function requestOf(messages) {  // the path and the body that ask for an answer to the messages
  const settings = readSettings(), body = {model: state.model, ...samplingOf(settings)};
  messages = messages.filter((message) => message.content);  // an answer that failed at once has none
  if (settings.record) body.attar = {tokens: true};
  if (state.chat) {
    body.messages = messages.map(({role, content}) => ({role, content}));
    if (chat.system.trim()) body.messages.unshift({role: "system", content: chat.system});
    return ["v1/chat/completions", settings.record ? {...body, logprobs: true, top_logprobs: 5} : body];
  }
  const prompt = chat.system + messages.map((message) => message.content).join("");
  return ["v1/completions", {max_tokens: 256, ...body, prompt, ...(settings.record ? {logprobs: 5} : {})}];
}

async function answer() {
  const [path, body] = requestOf(chat.messages);
  const message = {role: "assistant", content: ""};
  if (state.compare && $("compare").checked) message.other = {model: state.compare, content: ""};
  chat.messages.push(message);
  running = {message, controller: new AbortController()};
  busy(true);
  showChat();
  const {signal} = running.controller;
  try {
    const parts = [read(path, body, signal, message, message)];
    if (message.other) parts.push(read(path, {...body, model: state.compare}, signal, message, message.other));
    await Promise.all(parts);
    if (message.other && readSettings().record) await measure(body, message, signal);
    answers(true);
  } catch (error) {
    running.controller.abort();
    if (error.name === "AbortError") message.stopped = true;
    else message.failed = error.message || String(error);
    if (error.status === 0) answers(false);
    if (error.status === 401) askForKey(error.message);
  }
  running = null;
  chat.updated = Date.now();
  saveChat(chat);
  follow(message);
  busy(false, message.stopped ? "stopped" : message.failed ? message.failed : "answered");
  showList();
}

async function read(path, body, signal, message, target) {  // one model's answer into its target
  const start = performance.now(), list = [];
  let first, last = start, usage = 0, shown = false;
  tokens.set(target, list);
  for await (const chunk of stream(path, body, signal)) {
    if (chunk.usage) usage = chunk.usage.completion_tokens;
    for (const choice of chunk.choices) {
      const delta = choice.delta || choice;
      target.content += delta.content || delta.text || "";
      const thought = delta.reasoning_content || delta.reasoning;
      if (thought) target.thoughts = (target.thoughts || "") + thought;
      list.push(...tokensOf(choice));
      if (delta.content || delta.text || thought) { last = performance.now(); first = first || last; }
    }
    const count = usage || list.length;
    target.stats = {tokens: count, first: first && (first - start) / 1000, rate: count > 1 && last > first ? (1000 * (count - 1)) / (last - first) : 0};
    if (!shown) { shown = true; requestAnimationFrame(() => { shown = false; follow(message); }); }
  }
}

async function measure(body, message, signal) {
  const context = body.messages ? {messages: body.messages} : {prompt: body.prompt};
  const list = tokens.get(message);
  if (!list.length) return;
  try {
    const result = await scoreTokens(context, list, signal);
    message.divergence = `On the first answer's tokens the second model is ${result.mean_kl.toFixed(4)} nats a token away (KL).`;
  } catch (error) {
    if (error.name === "AbortError" || error.status === 0) throw error;
    message.divergence = error.message;
  }
}

function follow(message) {  // shows what has come
  fillMessage(message);
  if (atEnd) scrollToEnd();
}

function scrollToEnd() {
  $("log").scrollTop = $("log").scrollHeight;
}

function keepEnd() {  // a reader at the end stays there when the text grows or a panel opens; others are left alone
  const log = $("log");
  log.addEventListener("scroll", () => { atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 80; });
  new ResizeObserver(() => atEnd && scrollToEnd()).observe(log);
}
