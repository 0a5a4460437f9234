// The page: panels, settings, the list of chats, the key, and whether the server answers.

const RETRY_MS = 2000;
let reachable = true;

function busy(now, text = "ready") {
  $("log").setAttribute("aria-busy", now);
  $("stop").hidden = !now;
  $("send").hidden = now;
  for (const button of document.querySelectorAll("#chats button, #new")) button.disabled = now;
  if (reachable) say(now ? "answering" : text, !now && text !== "ready" && text !== "answered" && text !== "stopped");
}

function answers(now) {  // the server did, or did not, answer
  if (now === reachable) return;
  reachable = now;
  if (now) say("the server answers again");
  else {
    say("the server does not answer; trying again", true);
    setTimeout(tryAgain, RETRY_MS);
  }
}

async function tryAgain() {
  try {
    await call("health");
  } catch (error) {
    if (error.status === 0) return setTimeout(tryAgain, RETRY_MS);
  }
  answers(true);
  if (!state) readState();
}

async function readState() {
  if (document.body.dataset.key !== undefined && !readKey()) return askForKey("This server needs a key.");
  try {
    state = await (await call("attar/state")).json();
  } catch (error) {
    if (error.status === 401) return askForKey(error.message);
    if (error.status === 0) return answers(false);
    return say(error.message, true);
  }
  answers(true);
  say("ready");
  $("model").textContent = state.model;
  document.title = `${state.model} · attar`;
  $("prompt").placeholder = state.chat ? "Message" : "Text to continue";
  $("prompt-label").textContent = $("prompt").placeholder;
  $("compare-row").hidden = !state.compare;
  $("compare-name").textContent = state.compare || "";
  showChat();
  if (!$("engine").hidden) showEngine(state);
}

function askForKey(reason) {
  say(reason, true);
  openPanel("settings", true);
  $("key").focus();
}

function openPanel(name, open) {  // on a narrow screen, where it stands above the chat, in place of another
  for (const button of document.querySelectorAll("[data-panel]")) {
    const panel = button.dataset.panel;
    if (panel === name) $(panel).hidden = !open;
    else if (open && matchMedia("(max-width: 860px)").matches) $(panel).hidden = true;
    button.setAttribute("aria-expanded", !$(panel).hidden);
  }
}

function showList() {
  const items = readChats().map((one) => el("li", null,
    el("button", {type: "button", class: "open", "aria-current": one.id === chat.id ? "true" : null, title: one.title, onclick: () => openChat(one)}, el("span", null, one.title)),
    el("button", {type: "button", class: "quiet", title: "Delete this chat", "aria-label": `Delete ${one.title}`, onclick: () => deleteChat(one)}, "×")));
  $("chats").replaceChildren(...items);
}

function openChat(one) {
  if (running) return;
  chat = one;
  showChat();
  showList();
  $("prompt").focus();
}

function deleteChat(one) {
  if (running) return;
  removeChat(one.id);
  if (one.id === chat.id) chat = newChat();
  showChat();
  showList();
  $("new").focus();
}

function showSettings() {
  const settings = readSettings();
  for (const [name, label, least, most, step] of SAMPLING) {
    const input = el("input", {id: `set-${name}`, type: "number", min: least, max: most, step: step < 1 ? "any" : step, inputmode: "decimal"});
    input.value = settings[name] ?? "";
    input.addEventListener("change", () => {
      const valid = input.checkValidity();
      input.setAttribute("aria-invalid", !valid);
      if (valid) write(SETTINGS, {...readSettings(), [name]: input.value});
      else say(`${label}: a number from ${least} to ${most}`, true);
    });
    $("sampling").append(el("label", {for: `set-${name}`}, label), input);
  }
  $("record").checked = settings.record !== false;
  $("record").addEventListener("change", () => write(SETTINGS, {...readSettings(), record: $("record").checked}));
}

function showTheme() {
  document.documentElement.style.colorScheme = $("theme").value = readSettings().theme || "";
  if (state) showEngine(state);
}

function send() {
  if (!state || !ask($("prompt").value)) return;
  $("prompt").value = "";
}

function stop() {
  if (running) running.controller.abort();
}

function listen() {
  for (const button of document.querySelectorAll("[data-panel]")) {
    button.addEventListener("click", () => {
      openPanel(button.dataset.panel, $(button.dataset.panel).hidden);
      if (button.dataset.panel === "engine" && state) showEngine(state);
    });
  }
  $("composer").addEventListener("submit", (event) => { event.preventDefault(); send(); });
  $("prompt").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    send();
  });
  document.addEventListener("keydown", (event) => event.key === "Escape" && stop());
  $("stop").addEventListener("click", () => { stop(); $("prompt").focus(); });
  $("new").addEventListener("click", () => openChat(newChat()));
  $("system").addEventListener("change", () => { chat.system = $("system").value; saveChat(chat); showList(); });
  $("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    keepKey($("key").value.trim());
    $("key").value = "";
    readState();
  });
  $("theme").addEventListener("change", () => { write(SETTINGS, {...readSettings(), theme: $("theme").value}); showTheme(); });
  window.addEventListener("pagehide", () => { if (running) { running.message.stopped = true; saveChat(chat); } });
  window.addEventListener("storage", () => { if (!running) showList(); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => state && showEngine(state));
}

listen();
keepEnd();
showSettings();
showTheme();
openPanel("list", innerWidth > 1000);
chat = readChats()[0] || chat;
showChat();
showList();
readState();
pollEngine();
