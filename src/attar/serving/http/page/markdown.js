// Markdown as DOM nodes: the subset that models write. Links are http, https and mailto; an image becomes a
// link, so that nothing is loaded. Time is linear in the text: each search for an end that fails is not
// repeated in its block. While an answer grows, blocks that are complete keep their nodes.

const LINK = /^(https?:|mailto:)/i;
const FENCE = /^( {0,3})(`{3,}|~{3,})[ \t]*([\w+#.-]*)[^`]*$/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])(?: +|$)(.*)$/;
const HEADING = /^ {0,3}(#{1,6}) +(.*)$/;
const RULE = /^ {0,3}([-*_])(?: *\1){2,} *$/;
const TABLE_RULE = /^ *\|?(?: *:?-+:? *\|)+ *(?::?-+:? *)?$|^ *\| *:?-+:? *\|? *$/;

function renderMarkdown(parent, text) {
  const sources = markdownBlocks(text);
  const old = parent.sources || [];
  let same = 0;
  while (same < sources.length && sources[same] === old[same] && parent.children[same]) same++;
  while (parent.childNodes.length > same) parent.lastChild.remove();
  for (const source of sources.slice(same)) parent.append(blockNode(source, 0));
  parent.sources = sources;
}

function markdownBlocks(text) {  // sources of the blocks: fences stay whole, other blocks end at empty lines
  const blocks = [];
  let lines = [], fence = null, list = false;
  const close = () => {
    while (lines.length && !lines[lines.length - 1].trim()) lines.pop();
    if (lines.length) blocks.push(lines.join("\n"));
    lines = [];
  };
  for (const line of text.replace(/\r\n?/g, "\n").split("\n")) {
    const mark = line.match(FENCE);
    if (fence) {
      lines.push(line);
      if (line.trim().startsWith(fence) && !line.trim().slice(fence.length).replace(/[`~]/g, "")) {
        fence = null;
        if (!list) close();
      }
    } else if (mark && !list) {
      close();
      fence = mark[2];
      lines.push(line);
    } else if (!line.trim()) {
      if (list) lines.push(line);
      else close();
    } else {
      const item = ITEM.test(line) && !RULE.test(line);
      const inside = list && (item || line.startsWith("  ") || lines[lines.length - 1].trim());
      if (list && !inside) close();
      if (!list && (item || HEADING.test(line) || HEADING.test(lines[0] || ""))) close();
      list = lines.length ? list : item;
      if (mark) fence = mark[2];
      lines.push(line);
    }
    if (!lines.length) list = false;
  }
  close();
  return blocks;
}

function blockNode(source, depth) {
  const lines = source.split("\n"), first = lines[0];
  const fence = first.match(FENCE), heading = first.match(HEADING);
  if (fence) return codeBlock(lines, fence);
  if (RULE.test(first) && lines.length === 1) return el("hr");
  if (heading && lines.length === 1) return el(`h${Math.min(heading[1].length + 2, 5)}`, null, inline(heading[2].trim().replace(/ #+$/, "")));
  if (ITEM.test(first)) return listNode(lines, depth);
  if (/^ {0,3}>/.test(first) && depth < 6) {
    const quote = el("blockquote");
    const inner = lines.map((line) => line.replace(/^ {0,3}> ?/, "")).join("\n");
    quote.append(...markdownBlocks(inner).map((block) => blockNode(block, depth + 1)));
    return quote;
  }
  if (lines.length > 1 && first.includes("|") && lines[1].length < 1000 && TABLE_RULE.test(lines[1])) return tableNode(lines);
  return el("p", null, inline(source));
}

function codeBlock(lines, fence) {
  const closed = lines.length > 1 && lines[lines.length - 1].trim().startsWith(fence[2]);
  const code = lines.slice(1, closed ? -1 : undefined).map((line) => line.slice(0, fence[1].length).trim() + line.slice(fence[1].length)).join("\n");
  return codeNode(code, fence[3]);
}

function codeNode(code, language) {
  const caption = el("figcaption", null, el("span", null, language || "code"),
    el("button", {type: "button", class: "quiet", onclick: () => copy(code)}, "Copy code"));
  const label = `code ${language}`.trim();
  return el("figure", {class: "code"}, caption, el("pre", {tabindex: "0", role: "group", "aria-label": label}, el("code", null, code)));
}

function listNode(lines, depth) {
  const first = lines[0].match(ITEM), ordered = /\d/.test(first[2]);
  const list = el(ordered ? "ol" : "ul", ordered && parseInt(first[2]) !== 1 ? {start: parseInt(first[2])} : null);
  const indent = first[1].length;
  const items = [];
  for (const line of lines) {
    const item = line.match(ITEM);
    if (item && item[1].length <= indent + 1) items.push([item[3]]);
    else items[items.length - 1].push(line.replace(new RegExp(`^ {0,${indent + (ordered ? 3 : 2)}}`), ""));
  }
  for (const item of items) {
    const blocks = depth < 6 ? markdownBlocks(splitNested(item)) : [item.join("\n")];
    const nodes = blocks.map((block) => blockNode(block, depth + 1));
    list.append(el("li", null, nodes.map((node, index) => (node.tagName === "P" && !index ? [...node.childNodes] : node))));
  }
  return list;
}

function splitNested(lines) {  // an empty line before a nested list or fence, which ends the item's own text
  const start = lines.findIndex((line, index) => index && (ITEM.test(line) || FENCE.test(line)));
  return (start > 0 ? [...lines.slice(0, start), "", ...lines.slice(start)] : lines).join("\n");
}

function tableNode(lines) {
  const cells = (line) => line.trim().replace(/^\||\|$/g, "").split("|").map((cell) => inline(cell.trim()));
  const head = el("tr", null, cells(lines[0]).map((cell) => el("th", {scope: "col"}, cell)));
  const rows = lines.slice(2).map((line) => el("tr", null, cells(line).map((cell) => el("td", null, cell))));
  const table = el("table", null, el("thead", null, head), el("tbody", null, rows));
  return el("div", {class: "scroll", tabindex: "0", role: "group", "aria-label": "table"}, table);
}

const SPECIAL = /[\\`*_~[!<h\n]/g;
const MARKS = [["**", "strong"], ["__", "strong"], ["~~", "del"], ["*", "em"], ["_", "em"]];

function inline(text, depth = 0) {
  const nodes = [], missing = new Set();
  let plain = "", at = 0;
  const push = (node) => {
    if (plain) nodes.push(plain);
    plain = "";
    nodes.push(node);
  };
  const endOf = (mark, from) => {  // where a mark ends; a search that failed once fails until the end
    if (missing.has(mark)) return -1;
    const end = text.indexOf(mark, from);
    if (end < 0) missing.add(mark);
    return end;
  };
  while (at < text.length) {
    SPECIAL.lastIndex = at;
    const stop = SPECIAL.exec(text);
    plain += text.slice(at, stop ? stop.index : undefined);
    if (!stop) break;
    at = stop.index;
    const next = inlineAt(text, at, endOf, depth);
    if (next) { push(next.node); at = next.end; }
    else if (text[at] === "\\" && /[!-/:-@[-`{-~]/.test(text[at + 1] || "")) { plain += text[at + 1]; at += 2; }
    else { plain += text[at]; at += 1; }
  }
  if (plain) nodes.push(plain);
  return nodes;
}

function inlineAt(text, at, endOf, depth) {  // the element that begins here, and where it ends; or null
  const letter = text[at];
  if (letter === "\n") return /  $/.test(text.slice(Math.max(0, at - 2), at)) ? {node: el("br"), end: at + 1} : null;
  if (letter === "`") {
    const ticks = text.slice(at).match(/^`+/)[0], end = endOf(ticks, at + ticks.length);
    return end < 0 ? null : {node: el("code", null, text.slice(at + ticks.length, end)), end: end + ticks.length};
  }
  if (letter === "[" || (letter === "!" && text[at + 1] === "[")) return linkAt(text, at, endOf, depth);
  if (letter === "<" || letter === "h") {
    const url = text.slice(at, at + 2000).match(letter === "<" ? /^<((?:https?:\/\/|mailto:)[^\s<>]+)>/i : /^https?:\/\/[^\s<>"`]*[^\s<>"`.,;:!?)\]*_']/i);
    if (!url || (letter === "h" && /\w/.test(text[at - 1] || ""))) return null;
    return {node: anchor(url[1] || url[0], [url[1] || url[0]]), end: at + url[0].length};
  }
  for (const [mark, name] of MARKS) {
    if (depth > 5 || !text.startsWith(mark, at) || /\s|^$/.test(text[at + mark.length] || "")) continue;
    if (mark[0] === "_" && /\w/.test(text[at - 1] || "")) continue;
    let end = endOf(mark, at + mark.length + 1);
    for (let pairs = 0; mark.length === 1 && end >= 0 && text[end + 1] === mark && pairs < 20; pairs++) end = endOf(mark, end + 2);
    if (end < 0 || /\s/.test(text[end - 1]) || (mark[0] === "_" && /\w/.test(text[end + mark.length] || ""))) continue;
    return {node: el(name, null, inline(text.slice(at + mark.length, end), depth + 1)), end: end + mark.length};
  }
  return null;
}

function linkAt(text, at, endOf, depth) {
  const open = text.indexOf("[", at), middle = endOf("](", open), end = middle < 0 ? -1 : endOf(")", middle);
  if (middle < 0 || end < 0 || middle - open > 1000 || end - middle > 2000 || depth > 5) return null;
  const target = text.slice(middle + 2, end).trim().split(/\s/)[0].replace(/^<|>$/g, "");
  const label = text.slice(open + 1, middle);
  if (!LINK.test(target) || label.includes("[")) return null;
  return {node: anchor(target, text[at] === "!" ? [`image: ${label || target}`] : inline(label, depth + 1)), end: end + 1};
}

function anchor(target, children) {
  return el("a", {href: target, rel: "noopener noreferrer nofollow", target: "_blank"}, children);
}
