// The operator's page: follows the feed at `live`. The server has put everything into words; here they only find their
// places. What a client chose (the ids of requests) is set as text and nothing else.

const KEY = "kvikk-key";
const RETRY_S = [1, 2, 4, 8, 10];
const BUSY_AFTER_S = 3; // a state comes every second: later, the engine is in a long step
const LOST_AFTER_S = 15; // the server says something every 5 s: later, the connection is lost

const byId = (id) => document.getElementById(id);

// What is shown

function show(view) {
  for (const place of document.querySelectorAll("[data-text]")) {
    setText(place, view.texts[place.dataset.text] ?? "");
  }
  for (const [id, attributes] of Object.entries(view.shapes)) {
    for (const [name, value] of Object.entries(attributes)) byId(id).setAttribute(name, value);
  }
  showRows("requests", view.requests);
  showRows("pins", view.pins);
  setText(byId("death-reason"), view.dead_reason);
  byId("death").hidden = !view.dead_reason;
  byId("state").hidden = false;
  showStatus(view.dead_reason ? "dead" : "live", view.dead_reason ? "dead" : "live");
  document.title = `${view.dead_reason ? "dead: " : ""}kvikk · ${view.texts.model}`;
}

// Rows stay the elements that they are, so that a selection or a reader's place is not lost every second.
function showRows(id, rows) {
  const body = byId(id);
  const old = new Map([...body.rows].map((element) => [element.dataset.key, element]));
  rows.forEach((row, index) => {
    const element = old.get(row.key) ?? byId(`${id}-row`).content.firstElementChild.cloneNode(true);
    old.delete(row.key);
    element.dataset.key = row.key;
    element.dataset.state = row.state;
    for (const cell of element.querySelectorAll("[data-cell]")) setText(cell, row.cells[cell.dataset.cell]);
    element.querySelector("rect")?.setAttribute("width", row.width);
    if (body.rows[index] !== element) body.insertBefore(element, body.rows[index] ?? null);
  });
  for (const element of old.values()) element.remove();
}

function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

// The word is read aloud when it changes, the note is not.
function showStatus(state, word, note = "") {
  byId("status").dataset.state = state;
  setText(byId("status-word"), word);
  setText(byId("status-note"), note);
}

// The feed

class Refused extends Error {}

async function follow(signal) {
  if ("needed" in byId("key-form").dataset && !sessionStorage.getItem(KEY)) return askForKey();
  for (let failures = 0; !signal.aborted; failures += 1) {
    let why;
    try {
      await connect(signal, () => (failures = 0));
      why = "the server has closed it";
    } catch (error) {
      if (signal.aborted) return;
      if (error instanceof Refused) return askForKey(error.message);
      why = error.message;
    }
    const wait = RETRY_S[Math.min(failures, RETRY_S.length - 1)];
    showStatus("lost", "no connection", `(${why}); again in ${wait} s`);
    await new Promise((resolve) => setTimeout(resolve, 1000 * wait));
  }
}

// One connection, until it ends. `onState` is called with each state that came.
async function connect(signal, onState) {
  const key = sessionStorage.getItem(KEY);
  const connection = new AbortController();
  const stop = () => connection.abort(signal.reason);
  signal.addEventListener("abort", stop);
  let heardAt = Date.now();
  let stateAt = Infinity;
  const watch = setInterval(() => {
    const age = Math.round((Date.now() - stateAt) / 1000);
    if (Date.now() - heardAt > 1000 * LOST_AFTER_S) connection.abort(new Error("nothing is heard any more"));
    else if (age > BUSY_AFTER_S) showStatus("busy", "the engine is in a long step,", `silent for ${age} s`);
  }, 1000);
  try {
    const response = await fetch("live", {
      headers: key ? { Authorization: `Bearer ${key}` } : {},
      cache: "no-store",
      signal: connection.signal,
    });
    if (response.status === 401 || response.status === 403) throw new Refused(await reasonOf(response));
    if (!response.ok) throw new Error(await reasonOf(response));
    byId("forget").hidden = !key;
    stateAt = Date.now();
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    for (let rest = ""; ; ) {
      const { done, value } = await reader.read();
      if (done) return;
      heardAt = Date.now();
      const events = (rest + value).split("\n\n");
      rest = events.pop();
      for (const event of events.filter((text) => text.startsWith("data: "))) {
        stateAt = Date.now();
        show(JSON.parse(event.slice("data: ".length)));
        onState();
      }
    }
  } finally {
    clearInterval(watch);
    signal.removeEventListener("abort", stop);
  }
}

async function reasonOf(response) {
  const body = await response.json().catch(() => null);
  return body?.error?.message ?? `the server answers ${response.status}`;
}

// The key

function askForKey(message) {
  sessionStorage.removeItem(KEY);
  if (message) setText(byId("key-message"), message);
  showStatus("key", "waiting for the key");
  byId("state").hidden = true;
  byId("forget").hidden = true;
  byId("key-form").hidden = false;
  byId("key").focus();
}

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY, byId("key").value.trim());
  byId("key").value = "";
  byId("key-form").hidden = true;
  restart();
});

byId("forget").addEventListener("click", () => {
  sessionStorage.removeItem(KEY);
  location.reload();
});

// A page that is not seen does not ask.

let feed = new AbortController();

function restart() {
  feed.abort();
  feed = new AbortController();
  if (document.hidden) return;
  showStatus("connecting", "connecting");
  follow(feed.signal);
}

document.addEventListener("visibilitychange", restart);
restart();
