// Chats and settings in the browser's own storage: one entry for each chat, so that two tabs do not overwrite
// each other. Without storage, or when it is full, the page works and says so.

const CHAT = "attar.chat.", SETTINGS = "attar.settings";

function newChat() {
  return {id: `${Date.now().toString(36)}${Math.random().toString(36).slice(2, 8)}`, title: "", system: "", messages: [], updated: Date.now()};
}

function readChats() {
  const chats = [];
  try {
    for (let index = 0; index < localStorage.length; index++) {
      const name = localStorage.key(index);
      if (name.startsWith(CHAT)) chats.push(readJson(name));
    }
  } catch { /* no storage */ }
  return chats.filter((chat) => chat && Array.isArray(chat.messages)).sort((one, two) => two.updated - one.updated);
}

function readJson(name) {
  try { return JSON.parse(localStorage.getItem(name)); } catch { return null; }
}

function saveChat(chat) {
  if (!chat.messages.length && !chat.system) return;
  const first = chat.messages.find((message) => message.role === "user");
  chat.title = (first ? first.content : chat.system).trim().slice(0, 60) || "empty";
  write(CHAT + chat.id, chat);
}

function write(name, value) {
  try {
    localStorage.setItem(name, JSON.stringify(value));
  } catch {
    say("the browser's storage is full or off: delete chats to keep new ones", true);
  }
}

function removeChat(id) {
  try { localStorage.removeItem(CHAT + id); } catch { /* no storage */ }
}

const SAMPLING = [  // field, label, least, most, step
  ["temperature", "temperature", 0, 2, 0.1], ["top_p", "top p", 0, 1, 0.05], ["top_k", "top k", 0, 1000, 1],
  ["min_p", "min p", 0, 1, 0.01], ["repetition_penalty", "repetition penalty", 0.01, 100, 0.05],
  ["max_tokens", "most tokens", 1, 1000000, 1], ["seed", "seed", 0, 2 ** 53 - 1, 1],
];

function readSettings() {
  const settings = readJson(SETTINGS);
  return settings && typeof settings === "object" ? settings : {record: true};
}

function samplingOf(settings) {  // fields of a request: those that are set, and are numbers in their range
  const fields = {};
  for (const [name, , least, most] of SAMPLING) {
    const value = Number(settings[name]);
    if (settings[name] !== undefined && settings[name] !== "" && value >= least && value <= most) fields[name] = value;
  }
  return fields;
}
