// The engine, read once a second while its panel is open: load, a map of the cache's blocks, acceptance.

const STATES = {  // letter, what it means; drawn with a shape of its own, not by colour alone
  free: ["f", "nothing in it"], owned: ["o", "of one sequence"], shared: ["s", "of several sequences"],
  cached: ["c", "kept for prompts that begin the same"],
};
const POLL_MS = 1000, POINTS = 120;
const points = [];  // {at, drafted, accepted}

async function pollEngine() {
  if (!$("engine").hidden && !document.hidden) {
    try {
      showEngine(await (await call("attar/state")).json());
      answers(true);
    } catch (error) {
      if (error.status === 0) answers(false);
    }
  }
  setTimeout(pollEngine, POLL_MS);
}

function showEngine(state) {
  const rows = [["requests running", state.running], ["requests waiting", state.waiting], ["context", state.context ? `${state.context.toLocaleString("en")} tokens` : "no limit"],
    ["KV cache stored in", state.kv_dtype || "?"],
    ["prompts from the cache", state.prefix_queries ? percent(state.prefix_hits / state.prefix_queries) : "none yet"]];
  if (state.states) rows.push(["states of sequences", `${(state.states.bytes / 1e6).toFixed(1)} MB, ${state.states.snapshots} snapshots, ${state.states.reused} reused`]);
  $("load").replaceChildren(...rows.flatMap(([name, value]) => [el("dt", null, name), el("dd", null, String(value))]));
  $("blocks").hidden = !state.blocks;
  if (state.blocks) showBlocks(state.blocks);
  showAcceptance(state.speculation);
}

function showBlocks(blocks) {
  const canvas = $("blocks"), ratio = devicePixelRatio || 1, width = canvas.clientWidth || 250;
  const size = blocks.cells.length > 600 ? 7 : 10, columns = Math.floor(width / size);
  canvas.width = width * ratio;
  canvas.height = Math.ceil(blocks.cells.length / columns) * size * ratio;
  const brush = canvas.getContext("2d");
  brush.scale(ratio, ratio);
  const colours = boxColours();
  [...blocks.cells].forEach((letter, index) => drawBlock(brush, letter, (index % columns) * size, Math.floor(index / columns) * size, size, colours));
  const parts = Object.keys(STATES).map((name) => `${blocks.states[name]} ${name}`).join(", ");
  canvas.setAttribute("aria-label", `${parts}, ${blocks.quantized} quantized; ${blocks.block_size} tokens each`);
  const rows = Object.entries(STATES).map(([name, [letter, meaning]]) => legendRow(letter, blocks.states[name], `${name}: ${meaning}`, colours));
  rows.push(legendRow("O", blocks.quantized, "with a corner: quantized", colours));
  if (blocks.cell_blocks > 1) rows.push(el("li", null, `one square stands for ${blocks.cell_blocks} blocks`));
  $("block-legend").replaceChildren(...rows);
}

function boxColours() {
  const canvas = $("blocks");
  return Object.fromEntries(["soft", "p1", "p2", "p3", "paper", "ink"].map((name) => {
    canvas.style.color = `var(--${name})`;  // computed for the scheme that is shown
    return [name, getComputedStyle(canvas).color];
  }));
}

function drawBlock(brush, letter, x, y, size, colours) {
  const state = letter.toLowerCase(), inner = size - 2;
  brush.lineWidth = 1;
  brush.globalAlpha = state === "f" ? 0.4 : 1;
  brush.strokeStyle = {f: colours.soft, o: colours.p1, s: colours.p2, c: colours.p3}[state];
  brush.fillStyle = brush.strokeStyle;
  if (state === "o" || state === "s") brush.fillRect(x + 0.5, y + 0.5, inner, inner);
  else brush.strokeRect(x + 1, y + 1, inner - 1, inner - 1);
  if (state === "c") brush.fillRect(x + size / 2 - 1.5, y + size / 2 - 1.5, 2, 2);
  if (state === "s") {
    brush.strokeStyle = colours.paper;
    brush.beginPath();
    brush.moveTo(x + 1, y + inner);
    brush.lineTo(x + inner, y + 1);
    brush.stroke();
  }
  if (letter !== state) {
    brush.fillStyle = colours.ink;
    brush.fillRect(x + inner - 2.5, y + 0.5, 3, 3);
  }
}

function legendRow(letter, count, meaning, colours) {
  const ratio = devicePixelRatio || 1;
  const sample = el("canvas", {width: 12 * ratio, height: 12 * ratio, "aria-hidden": "true"});
  sample.style.width = sample.style.height = "12px";
  const brush = sample.getContext("2d");
  brush.scale(ratio, ratio);
  drawBlock(brush, letter, 0, 0, 12, colours);
  return el("li", null, sample, el("b", null, String(count)), ` ${meaning}`);
}

function showAcceptance(speculation) {
  if (!speculation) {
    $("acceptance").replaceChildren(el("p", {class: "note"}, "This server does not speculate; see --speculate and --draft."));
    return;
  }
  const last = points[points.length - 1];
  if (last && speculation.drafted < last.drafted) points.length = 0;  // a new process
  points.push({at: Date.now(), drafted: speculation.drafted, accepted: speculation.accepted});
  if (points.length > POINTS) points.shift();
  const rates = points.slice(1).map((point, index) => {
    const drafted = point.drafted - points[index].drafted;
    return drafted ? (point.accepted - points[index].accepted) / drafted : null;
  });
  const share = speculation.drafted ? percent(speculation.accepted / speculation.drafted) : "none yet";
  const text = `${speculation.proposer}: ${speculation.accepted} of ${speculation.drafted} tokens since the start, ${share}`;
  const positions = speculation.accepted_at.slice(0, 16).map((count) => count / Math.max(speculation.drafts, 1));
  $("acceptance").replaceChildren(el("p", {class: "note"}, text), rateChart(rates),
    positions.length ? el("p", {class: "note"}, "accepted as the 1st, 2nd, ... token of a draft") : null, positions.length ? positionChart(positions) : null);
}

function rateChart(rates) {  // the last two minutes, a point a second; gaps where nothing was drafted
  const y = (rate) => 6 + 60 * (1 - rate), x = (index) => 34 + (index * 216) / (POINTS - 1);
  let path = "";
  rates.forEach((rate, index) => {
    if (rate !== null) path += `${index && rates[index - 1] !== null ? "L" : "M"}${x(index).toFixed(1)} ${y(rate).toFixed(1)}h.1`;
  });
  const known = rates.filter((rate) => rate !== null);
  const label = known.length ? `acceptance now ${percent(known[known.length - 1])}` : "no drafts yet";
  return svg("svg", {viewBox: "0 0 250 74", role: "img", "aria-label": `last two minutes: ${label}`},
    [0, 0.5, 1].map((rate) => [svg("line", {class: "grid", x1: 34, x2: 250, y1: y(rate), y2: y(rate)}), svg("text", {x: 30, y: y(rate) + 4, "text-anchor": "end"}, `${100 * rate}%`)]),
    svg("path", {class: "line", d: path}));
}

function positionChart(positions) {
  const width = 216 / Math.max(positions.length, 6);
  const label = positions.map((rate, index) => `${index + 1}: ${percent(rate)}`).join(", ");
  return svg("svg", {viewBox: "0 0 250 60", role: "img", "aria-label": label},
    svg("line", {class: "grid", x1: 34, x2: 250, y1: 46, y2: 46}),
    positions.map((rate, index) => [
      svg("rect", {class: "bar-rate", x: 35 + index * width, width: width - 3, y: 46 - 40 * rate, height: 40 * rate}),
      svg("text", {x: 35 + (index + 0.5) * width - 1.5, y: 58, "text-anchor": "middle"}, String(index + 1)),
    ]));
}
