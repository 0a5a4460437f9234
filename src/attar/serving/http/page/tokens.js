// The tokens of an answer: who proposed each (underlined), how probable it was, and how far a second model is
// from the first there (shaded). Details of one token at a time: arrow keys, the pointer, or a tap.

const SHADES = {
  proposer: {label: "who proposed it", known: () => true},
  probability: {label: "its probability", known: (token) => token.logprob !== undefined, shade: (token) => 1 - Math.exp(token.logprob)},
  divergence: {label: "KL to the second model", known: (token) => token.kl !== undefined, shade: (token) => Math.min(1, Math.sqrt(token.kl))},
};

function withTexts(tokens) {  // the text of each token: a character that spans several is the last one's
  const decoder = new TextDecoder();
  for (const token of tokens) token.text = decoder.decode(new Uint8Array(token.bytes), {stream: true});
  return tokens;
}

function proposersOf(tokens) {  // names with their number of tokens, the target first
  const counts = new Map([["target", 0]]);
  for (const token of tokens) counts.set(token.proposer, (counts.get(token.proposer) || 0) + 1);
  return counts;
}

function draftedShare(tokens) {
  return tokens.length ? 1 - proposersOf(tokens).get("target") / tokens.length : 0;
}

function markOf(names, name) {
  return `p${Math.min(names.indexOf(name), 5)}`;
}

function tokenView(tokens) {
  withTexts(tokens);
  const names = [...proposersOf(tokens).keys()];
  const spans = tokens.map((token, index) => {
    const shown = token.text === "" ? "◌" : token.text.replace(/\n/g, "↵\n");
    return el("span", {class: `token ${markOf(names, token.proposer)}`, "data-index": index}, shown);
  });
  const detail = el("p", {class: "detail", "aria-live": "polite"}, "Arrow keys or a tap: one token's details.");
  const view = el("div", {class: "tokens by-source", tabindex: "0", role: "application", "aria-roledescription": "tokens", "aria-label": `${tokens.length} tokens`}, spans);
  let current = -1;
  const choose = (index) => {
    if (spans[current]) spans[current].classList.remove("current");
    current = Math.max(0, Math.min(tokens.length - 1, index));
    spans[current].classList.add("current");
    spans[current].scrollIntoView({block: "nearest"});
    detail.replaceChildren(...tokenDetail(tokens[current], current, tokens.length));
  };
  view.addEventListener("click", (event) => event.target.dataset.index && choose(Number(event.target.dataset.index)));
  view.addEventListener("keydown", (event) => {
    const step = {ArrowRight: 1, ArrowDown: 10, ArrowLeft: -1, ArrowUp: -10, Home: -Infinity, End: Infinity}[event.key];
    if (!step || event.ctrlKey || event.altKey || event.metaKey) return;
    event.preventDefault();
    choose(current < 0 ? 0 : current + step);
  });
  const select = el("select", {"aria-label": "What the tokens show", onchange: () => show(select.value)},
    Object.entries(SHADES).filter(([, one]) => tokens.some(one.known)).map(([name, one]) => el("option", {value: name}, one.label)));
  const show = (name) => {
    view.className = `tokens ${name === "proposer" ? "by-source" : "by-shade"}`;
    legend.hidden = name !== "proposer";
    scale.hidden = name === "proposer";
    scale.textContent = name === "divergence" ? "The darker, the further apart the two models' distributions are." : "The darker, the less probable the token was.";
    if (SHADES[name].shade) spans.forEach((span, index) => span.style.setProperty("--shade", SHADES[name].known(tokens[index]) ? SHADES[name].shade(tokens[index]).toFixed(3) : 0));
  };
  const legend = el("ul", {class: "legend"}, [...proposersOf(tokens)].map(([name, count]) =>
    el("li", null, el("span", {class: `sample ${markOf(names, name)}`}, name), " ", el("b", null, percent(count / tokens.length)))));
  const scale = el("p", {class: "note", hidden: true});
  return el("div", null, el("div", {class: "row"}, select), legend, scale, view, detail);
}

function tokenDetail(token, index, count) {
  const quoted = (text) => `“${text.replace(/\n/g, "↵")}”`;
  const parts = [el("b", null, quoted(token.text)), ` token ${index + 1} of ${count}`, token.id === undefined ? null : `, id ${token.id}`,
    token.proposer === "target" ? ", by the target itself" : `, proposed by ${token.proposer}, accepted by the target`];
  if (token.logprob !== undefined) parts.push(`, probability ${percent(Math.exp(token.logprob))}`);
  if (token.kl !== undefined) parts.push(`, ${percent(Math.exp(token.otherLogprob))} in the second model, KL ${token.kl.toFixed(4)} nats`);
  if (token.top && token.top.length) {
    parts.push(". Likeliest here: ", token.top.map(([name, logprob]) => `${quoted(name)} ${percent(Math.exp(logprob))}`).join(", "));
  }
  return parts.filter((part) => part !== null);
}
