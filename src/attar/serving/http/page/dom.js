// Elements as nested calls: el("p", {class: "note"}, "size: ", el("b", null, "5 < 6")). Text becomes text
// nodes, so nothing that a model writes is ever read as HTML.

const $ = (id) => document.getElementById(id);

function el(name, attributes, ...children) {
  return fill(document.createElement(name), attributes, children);
}

function svg(name, attributes, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", name), attributes, children);
}

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat(9).filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

function percent(share) {
  return `${(100 * share).toFixed(share > 0 && share < 0.0995 ? 1 : 0)} %`;
}

function say(text, trouble = false) {  // in the status line, which screen readers announce
  if ($("status").textContent !== text) $("status").textContent = text;
  $("status").classList.toggle("trouble", trouble);
}

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {  // no clipboard outside of https and localhost
    const area = el("textarea", {class: "hidden", "aria-hidden": "true"});
    document.body.append(area);
    area.value = text;
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  say("copied");
}
