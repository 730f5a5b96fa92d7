// One answer as it comes: its text, and how long it took.

import { call, events } from "./api.js";
import { count } from "./costs.js";

/**
 * Ask for a stream, and write its text into an element as it comes. Returns the text and the usage.
 * `first` is called at the first piece; `facts` is the element that says how it went.
 */
export async function stream(path, json, { into, facts, signal, first = () => {} }) {
  const began = performance.now();
  const seconds = () => ((performance.now() - began) / 1000).toFixed(2);
  let toFirst = null;
  let text = "";
  let usage = null;
  into.setAttribute("aria-busy", "true"); // it is read aloud when it is whole
  try {
    const asked = { ...json, stream: true, stream_options: { include_usage: true } };
    for await (const { data } of events(await call(path, { json: asked, signal }))) {
      usage = data.usage ?? usage;
      const piece = data.choices[0]?.text ?? data.choices[0]?.delta.content;
      if (!piece) continue;
      if (toFirst === null) {
        toFirst = seconds();
        first();
      }
      text += piece;
      into.append(piece);
      facts.textContent = `first token after ${toFirst} s`;
    }
    if (!text) into.append("(nothing)");
    const told = toFirst === null ? [] : [`first token after ${toFirst} s`];
    facts.textContent = [...told, `${count(usage.prompt_tokens)} states read`, `${seconds()} s in all`].join(" · ");
    return { text, usage };
  } finally {
    into.removeAttribute("aria-busy");
  }
}
