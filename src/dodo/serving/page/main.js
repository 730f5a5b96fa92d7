// The page: a text, its nuggets at a ratio, and what can be asked of them.

import { answer } from "./answers.js";
import { ask, useKey } from "./api.js";
import { leave } from "./context.js";
import { showCosts } from "./costs.js";
import { listen } from "./entry.js";
import { slide } from "./ratio.js";
import { rebuild } from "./rebuild.js";
import { Tokens } from "./tokens.js";

const $ = (selector) => document.querySelector(selector);
const [entry, reading, key] = [$("#entry"), $("#reading"), $("#key")];
const later = [reading, $("#ask"), $("#rebuild")];
const tokens = new Tokens({ root: $("#tokens"), caption: $("#token"), table: $("#table") });
const now = { text: "", name: "", ratio: 1 };
const clearing = []; // what empties the sections for another text
let looking = new AbortController();
let started = false;

/** Show a text that has come in, or say what is wrong with it. */
async function read({ text, file }) {
  const [said, error] = [entry.querySelector("[role=status]"), entry.querySelector(".error")];
  said.textContent = "scoring …";
  error.textContent = "";
  try {
    const seen = await inspect(file ? { form: formOf(file) } : { json: { text, ratio: now.ratio } });
    [now.text, now.name] = [seen.text ?? text, file?.name ?? "Pasted text"];
    tokens.show(seen.spans);
    show(seen);
    $("#reading-title").textContent = now.name;
    for (const section of later) section.hidden = false;
    entry.hidden = true;
    $("#reading-title").focus();
  } catch (problem) {
    if (problem.name !== "AbortError") error.textContent = problem.message;
  }
  said.textContent = "";
}

/** Look at the same text with another ratio. */
async function reselect(ratio) {
  now.ratio = ratio;
  if (!now.text) return;
  const error = reading.querySelector(".error[role=alert]");
  try {
    show(await inspect({ json: { text: now.text, ratio, spans: false } }));
    error.textContent = "";
  } catch (problem) {
    if (problem.name !== "AbortError") error.textContent = problem.message;
  }
}

function inspect(body) {
  looking.abort(); // the latest counts
  looking = new AbortController();
  return ask("v1/inspect", { ...body, signal: looking.signal });
}

function formOf(file) {
  const form = new FormData();
  form.set("file", file);
  form.set("ratio", now.ratio);
  return form;
}

function show(seen) {
  tokens.mark(seen.selected);
  showCosts(reading, seen);
  $("#untrained").hidden = seen.trained;
}

function another() {
  for (const clear of clearing) clear();
  leave();
  now.text = "";
  for (const section of later) section.hidden = true;
  entry.hidden = false;
  entry.querySelector("textarea").select();
}

async function start() {
  const [model] = (await ask("v1/models")).data;
  $("#model").textContent = model.id;
  now.ratio = slide($("#ratio"), $("#ratio-shown"), model, reselect);
  const about = () => ({ ...now });
  clearing.push(answer($("#ask"), model, about), rebuild($("#rebuild"), model, about));
  listen(entry, read);
  $("#another").addEventListener("click", another);
  addEventListener("pagehide", leave);
  entry.hidden = false;
  started = true;
}

document.addEventListener("locked", ({ detail }) => {
  key.querySelector(".error").textContent = detail.tried ? "This is not a key of this server." : "";
  key.hidden = false;
  key.querySelector("input").select();
});

async function begin() {
  $("#trouble").textContent = "";
  try {
    await start();
  } catch (problem) {
    if (key.hidden) $("#trouble").textContent = problem.message;
  }
}

key.addEventListener("submit", (event) => {
  event.preventDefault();
  useKey(key.querySelector("input").value.trim());
  key.hidden = true;
  if (!started) begin();
});

begin();
