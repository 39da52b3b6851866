"use strict";
const facts = JSON.parse(document.getElementById("facts").textContent);
const at = (id) => document.getElementById(id);
const make = (tag, name, text) => {
  const node = document.createElement(tag);
  if (name) node.className = name;
  if (text !== undefined) node.textContent = text;
  return node;
};
let history = [];
let running = null;

/* An answer's text grows behind its tokens: spans are drawn as far as text is known. */
class Answer {
  constructor(box, alone) {
    this.box = box;
    this.alone = alone;
    this.letters = [];
    this.tokens = [];
    this.drawn = 0;
    this.open = null;
  }

  add(text, step) {
    for (const letter of text) this.letters.push(letter);
    if (step) step.tokens.forEach((token, i) => this.tokens.push({
      start: token.start, kind: token.kind, first: i === 0,
      refused: token.kind === "corrected" ? step.rejected : [],
    }));
    this.draw();
  }

  draw() {
    if (this.open) { this.open.remove(); this.open = null; }
    while (this.drawn < this.tokens.length) {
      const next = this.tokens[this.drawn + 1];
      const end = next ? next.start : this.letters.length;
      const node = this.span(this.tokens[this.drawn], Math.min(end, this.letters.length));
      if (next && next.start <= this.letters.length) {
        if (node) this.box.append(node);
        this.drawn += 1;
        continue;
      }
      if (node) { this.box.append(node); this.open = node; }
      return;
    }
  }

  span(token, end) {
    const text = this.letters.slice(token.start, end).join("");
    if (!text && !token.refused.length) return null;
    if (this.alone) return make("span", "piece alone", text);
    const node = make("span", token.first ? "step" : "");
    if (token.refused.length) node.append(make("span", "no", token.refused.join("").replaceAll("\n", "\u23ce")));
    const piece = make("span", "piece " + token.kind, text);
    piece.title = token.kind + (token.refused.length ? ", instead of: " + token.refused.join("") : "");
    node.append(piece);
    return node;
  }
}

class Figures {
  constructor(size) {
    this.steps = 0; this.admitted = 0; this.accepted = 0; this.tokens = 0;
    this.tried = new Array(size).fill(0);
    this.kept = new Array(size).fill(0);
    this.begun = 0; this.last = 0; this.before = 0;
  }

  add(step) {
    const now = performance.now();
    this.tokens += step.tokens.length;
    if (!this.begun) { this.begun = now; this.before = this.tokens; }
    this.last = now;
    if (!step.drafted) return;
    this.steps += 1; this.admitted += step.admitted; this.accepted += step.accepted;
    for (let k = 0; k < step.admitted; k++) this.tried[k] += 1;
    for (let k = 0; k < step.accepted; k++) this.kept[k] += 1;
  }

  get speed() {
    const seconds = (this.last - this.begun) / 1000;
    return seconds > 0 ? (this.tokens - this.before) / seconds : null;
  }
}

function show(figures) {
  at("length").textContent = figures.steps ? (1 + figures.accepted / figures.steps).toFixed(2) : "–";
  at("share").textContent = figures.admitted ? Math.round(100 * figures.accepted / figures.admitted) + " %" : "–";
  if (figures.speed !== null) at("speed").textContent = figures.speed.toFixed(1);
  const box = at("slots");
  while (box.children.length < facts.block_size) {
    const row = make("div", "slot");
    const track = make("div", "track");
    track.append(make("div", "admitted"), make("div", "accepted"));
    row.append(make("span", "", String(box.children.length + 1)), track, make("span", "", "–"));
    box.append(row);
  }
  const shares = figures.kept.map((n) => figures.steps ? n / figures.steps : 0);
  shares.forEach((share, k) => {
    const row = box.children[k];
    const tried = figures.steps ? figures.tried[k] / figures.steps : 0;
    row.querySelector(".admitted").hidden = !tried;
    row.querySelector(".admitted").style.width = 100 * tried + "%";
    row.querySelector(".accepted").style.width = 100 * share + "%";
    row.lastChild.textContent = figures.steps ? Math.round(100 * share) + " %" : "–";
  });
  if (figures.steps) box.setAttribute("aria-label", "Accepted per slot: "
    + shares.map((s, k) => (k + 1) + ": " + Math.round(100 * s) + " percent").join(", "));
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    rest += value;
    let cut;
    while ((cut = rest.indexOf("\n\n")) >= 0) {
      const line = rest.slice(0, cut);
      rest = rest.slice(cut + 2);
      if (line === "data: [DONE]") return;
      if (line.startsWith("data: ")) yield JSON.parse(line.slice(6));
    }
  }
}

async function ask(messages, speculate, answer, figures, signal) {
  const headers = { "Content-Type": "application/json" };
  if (at("key").value) headers.Authorization = "Bearer " + at("key").value;
  const response = await fetch("/v1/chat/completions", {
    method: "POST", headers, signal,
    body: JSON.stringify({
      model: facts.model, messages, speculate, stream: true, return_token_kinds: true,
      temperature: Number(at("temperature").value), max_tokens: Number(at("most").value), seed: 1,
    }),
  });
  if (!response.ok) throw new Error((await response.json()).error.message);
  let text = "";
  for await (const chunk of events(response)) {
    if (chunk.error) throw new Error(chunk.error.message);
    for (const choice of chunk.choices) {
      const step = choice.dspark ? choice.dspark.steps[0] : null;
      text += choice.delta.content || "";
      if (step) figures.add(step);
      answer.add(choice.delta.content || "", step);
    }
    if (speculate) show(figures);
  }
  return text;
}

function turn(kind, title) {
  if (at("hint")) at("hint").remove();
  const box = make("article", "turn " + kind);
  const head = make("h3", "", title);
  const text = make("div", "text");
  box.append(head, text);
  at("turns").append(box);
  return { box, head, text };
}

function verdict(text, plain, exact) {
  if (text === plain) return "The same text.";
  return exact ? "Another text: rounding differs between one token and a block."
    : "Another text: at this temperature texts are random.";
}

async function exchange(message) {
  const user = turn("user", "You");
  user.text.textContent = message;
  history.push({ role: "user", content: message });
  const messages = history.slice();
  const drafting = Boolean(facts.draft);
  const reply = turn("assistant", facts.model);
  const figures = new Figures(facts.block_size);
  const exact = Number(at("temperature").value) === 0;
  at("plain").textContent = "–";
  at("gain").textContent = "tok/s plain";
  try {
    const text = await ask(messages, drafting, new Answer(reply.text, !drafting), figures, running.signal);
    history.push({ role: "assistant", content: text });
    const length = figures.steps ? ", " + (1 + figures.accepted / figures.steps).toFixed(2) + " a forward" : "";
    reply.head.append(make("span", "", figures.tokens + " tokens" + length));
    if (!drafting || !at("compare").checked) return;
    at("state").textContent = "Once more, without the draft…";
    const details = make("details");
    const summary = make("summary", "", "Without the draft…");
    const box = make("div", "text");
    details.append(summary, box);
    reply.box.append(details);
    const other = new Figures(facts.block_size);
    const plain = await ask(messages, false, new Answer(box, true), other, running.signal);
    const gain = figures.speed !== null && other.speed !== null ? figures.speed / other.speed : null;
    at("plain").textContent = other.speed === null ? "–" : other.speed.toFixed(1);
    if (gain !== null) at("gain").textContent = "tok/s plain; the draft has " + gain.toFixed(2) + "x its speed";
    summary.textContent = "Without the draft: " + (other.speed || 0).toFixed(1) + " tok/s. " + verdict(text, plain, exact);
  } catch (error) {
    if (error.name === "AbortError") { reply.head.append(make("span", "", "stopped")); return; }
    reply.box.classList.add("fault");
    reply.text.append(make("p", "", "Failed: " + error.message));
  }
}

async function send(message) {
  if (!message || running) return;
  running = new AbortController();
  at("send").disabled = true;
  if (at("example")) at("example").disabled = true;
  at("stop").disabled = false;
  at("turns").setAttribute("aria-busy", "true");
  at("state").textContent = "Answering…";
  try {
    await exchange(message);
  } finally {
    running = null;
    at("send").disabled = false;
    if (at("example")) at("example").disabled = false;
    at("stop").disabled = true;
    at("turns").setAttribute("aria-busy", "false");
    at("state").textContent = "";
  }
}

function clear() {
  if (running) running.abort();
  history = [];
  at("turns").replaceChildren();
  show(new Figures(facts.block_size));
}

/* A held-out conversation: its earlier turns are shown as given, the last one is asked. */
let shown = 0;
function example() {
  if (running) return;
  clear();
  const messages = facts.examples[shown % facts.examples.length];
  shown += 1;
  for (const message of messages.slice(0, -1)) {
    history.push(message);
    turn("given " + message.role, "Given: " + message.role).text.textContent = message.content;
  }
  send(messages[messages.length - 1].content);
}

at("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  const message = at("text").value.trim();
  if (running) return;
  at("text").value = "";
  send(message);
});
if (at("example")) at("example").addEventListener("click", example);
at("text").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); at("ask").requestSubmit(); }
});
at("stop").addEventListener("click", () => running && running.abort());
at("fresh").addEventListener("click", clear);
at("temperature").addEventListener("input", () => { at("shown-temperature").textContent = at("temperature").value; });
at("refused").addEventListener("change", () => document.body.classList.toggle("refused", at("refused").checked));
if (facts.block_size) show(new Figures(facts.block_size));
