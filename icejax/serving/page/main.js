// The page: a chat with the model, a text file as the document, settings, and what the cache looks at.

import { ask, stream, useKey } from "./api.js";
import { Answer, userMessage } from "./messages.js";
import { Picture } from "./picture.js";

const $ = (id) => document.getElementById(id);
const number = new Intl.NumberFormat("en");
const BODY_BYTES = 2 ** 20, TOKEN_BYTES = 16; // the server takes no longer bodies
const AROUND = 40; // tokens of a passage before and behind the place that was selected

let about = null; // what /v1/icejax says
let file = null; // {name, text, tokens}: the document of the next message
let newest = 0; // number of the newest file; one that is still read when another comes, or a new chat, is dropped
let turns = []; // {role, content}
let running = null; // AbortController of the answer that comes
let prompt = null; // the body that the picture belongs to, for /tokenize
let promptTokens = null; // a promise of its token ids

const picture = new Picture($("picture"), showPassage);

function tell(problem) {
  $("problem").textContent = problem;
}

function bytes(count) {
  const units = ["bytes", "KiB", "MiB", "GiB", "TiB"];
  const power = count ? Math.min(Math.floor(Math.log2(count) / 10), units.length - 1) : 0;
  return `${(count / 1024 ** power).toLocaleString("en", { maximumSignificantDigits: 3 })} ${units[power]}`;
}

// The server and its cache

async function begin() {
  try {
    about = await ask("/v1/icejax");
  } catch (error) {
    if (error.status === 401) {
      askForKey();
    } else {
      $("model").textContent = error.message;
      setTimeout(begin, 1000);
    }
    return;
  }
  $("key-form").hidden = true;
  $("model").textContent = about.model;
  document.title = `${about.model} · icejax`;
  showCache();
  $("max-tokens").max = about.max_new_tokens;
  $("max-tokens").value = Math.min($("max-tokens").value, about.max_new_tokens);
  if (!about.has_chat_template) {
    $("welcome-text").textContent = "This model continues text. Write the beginning of one, or drop a text file here.";
    $("message").placeholder = "Text to continue";
  }
  $("explain").disabled = !about.can_explain;
  if (!about.can_explain) {
    const reason = about.host_bytes ? "Not where several processes share the model." : "This cache holds nothing in host memory.";
    $("explain-note").textContent = reason;
  }
  for (const id of ["message", "open", "send"]) $(id).disabled = false;
  $("message").focus();
}

function askForKey() {
  const wasAsked = !$("key-form").hidden;
  $("key-form").hidden = false;
  $("key-error").textContent = wasAsked ? "The server does not know this key." : "";
  $("model").textContent = "This server asks for a key.";
  $("key").focus();
}

function showCache() {
  const budget = about.budget === null ? "" : `, ${number.format(about.budget)} tokens attended exactly per head and layer`;
  const room = number.format(about.context_length);
  const reserved = `Reserved for an answer and its prompt, ${room} tokens:`;
  $("cache-about").textContent = `${about.cache}${budget}, as the server was started. ${reserved}`;
  const most = Math.max(about.device_bytes, about.host_bytes, about.full_bytes);
  for (const name of ["device", "host", "full"]) {
    const count = about[`${name}_bytes`];
    $(`${name}-bytes`).textContent = bytes(count);
    $(`${name}-bar`).style.width = `${(100 * count) / most}%`;
  }
}

// The document

async function openFile(opened) {
  const mine = ++newest;
  tell("");
  const room = about.context_length;
  const tooLong = (tokens) =>
    `${opened.name} has ${tokens} tokens and the context has room for ${number.format(room)}, question and answer ` +
    "included: open a shorter file, or start the server with a longer --context-length.";
  if (opened.size > TOKEN_BYTES * room + BODY_BYTES / 2) return tell(tooLong("too many"));
  setReading(opened.name);
  try {
    const text = new TextDecoder("utf-8", { fatal: true }).decode(await opened.arrayBuffer());
    if (!text || text.includes("\0")) throw new TypeError();
    const { count } = await ask("/tokenize", { prompt: text, add_special_tokens: false });
    if (mine !== newest) return;
    if (count >= room) return tell(tooLong(number.format(count)));
    setFile({ name: opened.name, text, tokens: count });
  } catch (error) {
    if (mine !== newest) return;
    const isLong = error.status === 400 || error.status === 413;
    if (error instanceof TypeError) tell(`${opened.name} is empty, or no text in UTF-8.`);
    else tell(isLong ? `${opened.name}: ${error.message}` : error.message);
  } finally {
    if (mine === newest) setReading(null);
  }
}

/** Shows that a file is read; no question is sent before its document is there. */
function setReading(name) {
  $("send").disabled = Boolean(name);
  $("status").textContent = name ? `${name} is read` : "";
}

function removeFile() {
  newest++;
  setReading(null);
  setFile(null);
}

function setFile(opened) {
  file = opened;
  $("document").hidden = !file;
  $("document-name").textContent = file ? `${file.name}, ${number.format(file.tokens)} tokens` : "";
  if (!running) $("message").focus();
}

// The chat

function bodyOf(conversation) {
  if (about.has_chat_template) return ["/v1/chat/completions", { messages: conversation }];
  return ["/v1/completions", { prompt: conversation.map((turn) => turn.content).join("") }];
}

function options() {
  const value = (id) => ($(id).value === "" ? undefined : Number($(id).value));
  const given = { temperature: value("temperature"), top_p: value("top-p"), max_tokens: value("max-tokens"), seed: value("seed") };
  return { ...given, explain: $("explain").checked };
}

async function send() {
  const question = $("message").value;
  if (running || !about || $("send").disabled || !(question.trim() || file)) return;
  for (const input of $("settings").querySelectorAll("input")) if (!input.reportValidity()) return;
  tell("");
  const asked = file, gap = about.has_chat_template ? "\n\n" : "\n";
  const content = asked ? asked.text + (question ? gap + question : "") : question;
  const conversation = [...turns, { role: "user", content }];
  const [path, input] = bodyOf(conversation);
  const body = { model: about.model, ...input, ...options() };
  const shown = userMessage(question, asked && `${asked.name}, ${number.format(asked.tokens)} tokens`);
  const answer = new Answer();
  $("welcome").hidden = true;
  $("log").append(shown, answer.element);
  $("message").value = "";
  setFile(null);
  if (body.explain) {
    [prompt, promptTokens] = [input, null];
    picture.clear();
    $("picture-box").hidden = $("passage-box").hidden = true;
  }
  setRunning(new AbortController());
  try {
    const cost = await read(path, body, answer);
    answer.end(cost);
    turns = [...conversation, { role: "assistant", content: answer.text }];
  } catch (error) {
    if (error.name === "AbortError") {
      answer.end("Stopped.");
      if (answer.element.isConnected) turns = [...conversation, { role: "assistant", content: answer.text }]; // else: a new chat
    } else {
      answer.fail(error.message);
      $("message").value = question;
      setFile(asked);
      if (error.status === 401) askForKey();
    }
  } finally {
    setRunning(null);
  }
}

/** Reads an answer as it comes; returns a line of what it cost. */
async function read(path, body, answer) {
  const started = performance.now();
  let first = null, last = null, usage = null;
  $("status").textContent = "The prompt is read.";
  await stream(path, body, running.signal, (chunk) => {
    usage = chunk.usage ?? usage;
    const [choice] = chunk.choices;
    if (!choice || choice.delta?.role) return;
    last = performance.now();
    if (first === null) {
      first = last;
      $("status").textContent = "";
    }
    const log = $("log"), isAtEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 60;
    answer.add(choice.delta ? choice.delta.content : choice.text, choice.delta?.reasoning);
    if (isAtEnd) log.scrollTop = log.scrollHeight;
    if (choice.attention) showPicture(choice.attention);
  });
  const seconds = (last - first) / 1000, tokens = usage.completion_tokens;
  const parts = [`first token ${((first - started) / 1000).toFixed(2)} s`];
  if (tokens > 1 && seconds > 0) parts.push(`${((tokens - 1) / seconds).toFixed(1)} tokens/s`);
  parts.push(`${number.format(tokens)} tokens`);
  const cached = usage.prompt_tokens_details.cached_tokens;
  parts.push(`prompt ${number.format(usage.prompt_tokens)}${cached ? `, ${number.format(cached)} from the cache` : ""}`);
  return parts.join(" · ");
}

function setRunning(controller) {
  running = controller;
  $("log").setAttribute("aria-busy", String(Boolean(controller))); // whole answers are read aloud, not tokens
  $("stop").hidden = !controller;
  $("send").hidden = Boolean(controller);
  if (!controller) $("status").textContent = "";
  $(controller ? "stop" : "message").focus({ preventScroll: true });
}

function newChat() {
  running?.abort();
  turns = [];
  removeFile();
  tell("");
  [prompt, promptTokens] = [null, null];
  picture.clear();
  for (const id of ["picture-box", "passage-box"]) $(id).hidden = true;
  $("log").replaceChildren($("welcome"));
  $("welcome").hidden = false;
}

// What the cache looks at

function showPicture(attention) {
  $("picture-box").hidden = false;
  $("picture-end").textContent = number.format(attention.prompt_tokens);
  const layers = `${attention.layers[0]} to ${attention.layers.at(-1)}`;
  $("picture").setAttribute("aria-label", `Attention of layers ${layers} to ${attention.prompt_tokens} positions of the prompt`);
  picture.draw(attention);
}

async function showPassage(row, column) {
  const [start, stop] = picture.positions(column), layer = picture.attention.layers[row];
  $("passage-box").hidden = false;
  const [first, last] = [start, stop - 1].map(number.format);
  const places = stop - start > 1 ? `positions ${first} to ${last}` : `position ${first}`;
  $("passage-title").textContent = `Layer ${layer}, ${places}`;
  const selected = picture.place.join();
  try {
    promptTokens ??= ask("/tokenize", prompt);
    const { tokens } = await promptTokens;
    const from = Math.max(0, start - AROUND);
    // Each text begins with the one before: spaces between tokens stay.
    const ends = [start, Math.max(stop, start + 1), stop + AROUND];
    const texts = await Promise.all(ends.map((end) => textOf(tokens.slice(from, end))));
    if (selected !== picture.place?.join()) return;
    const hit = document.createElement("mark");
    hit.textContent = texts[1].slice(texts[0].length);
    $("passage").replaceChildren(texts[0], hit, texts[2].slice(texts[1].length));
    $("passage").scrollTop = Math.max(0, hit.offsetTop - $("passage").offsetTop - 60);
  } catch (error) {
    promptTokens = null;
    $("passage").textContent = error.message;
  }
}

async function textOf(tokens) {
  return tokens.length ? (await ask("/detokenize", { tokens })).prompt : "";
}

// Events

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
$("message").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing && event.keyCode !== 229) { // 229: Safari's, of a composition
    event.preventDefault();
    send();
  }
});
$("stop").addEventListener("click", () => running?.abort());
$("new-chat").addEventListener("click", newChat);
$("open").addEventListener("click", () => $("file").click());
$("file").addEventListener("change", () => {
  const [opened] = $("file").files;
  if (opened) openFile(opened);
  $("file").value = "";
});
$("document-remove").addEventListener("click", removeFile);
$("brightest").addEventListener("click", () => {
  picture.place = picture.brightest();
  picture.draw(picture.attention);
  showPassage(...picture.place);
});
$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  useKey($("key").value.trim());
  $("key").value = "";
  begin();
});
window.addEventListener("dragover", (event) => {
  event.preventDefault();
  document.body.classList.add("dropping");
});
window.addEventListener("dragleave", (event) => {
  if (!event.relatedTarget) document.body.classList.remove("dropping");
});
window.addEventListener("drop", (event) => {
  event.preventDefault();
  document.body.classList.remove("dropping");
  const [dropped] = event.dataTransfer.files;
  if (dropped && about) openFile(dropped);
});

begin();
