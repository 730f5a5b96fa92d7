// The text rebuilt from its nuggets, and where it differs.

import { overContext } from "./context.js";
import { count } from "./costs.js";
import { difference } from "./difference.js";
import { Running } from "./running.js";
import { stream } from "./stream.js";

/** Let a section rebuild the text that `about` gives, from nuggets of its own if the model has such. Returns how to empty it. */
export function rebuild(section, model, about) {
  const running = new Running(section);
  const into = section.querySelector("#rebuilt");
  const [facts, legend, error] = [".facts", ".legend", ".error"].map((name) => section.querySelector(name));

  function clear() {
    running.drop();
    into.replaceChildren();
    into.hidden = legend.hidden = true;
    facts.textContent = error.textContent = "";
  }

  async function work(signal) {
    const source = about();
    try {
      const how = { report: (said) => (facts.textContent = said), signal };
      const { text } = await overContext(source, model.by_use ? "text" : "questions", how, (id) => {
        into.hidden = false;
        return stream(`v1/contexts/${id}/reconstruction`, {}, { into, facts, signal });
      });
      const found = difference(source.text, text);
      if (found === null) return facts.append(" · too long to mark differences");
      into.replaceChildren(...found.parts.map(shown));
      legend.hidden = false;
      const share = ((100 * found.same) / found.all).toFixed(1);
      facts.textContent = `${share}% of the words came back: ${count(found.same)} of ${count(found.all)}, at ratio ${source.ratio}`;
    } catch (problem) {
      if (!running.isLast(signal)) return;
      if (problem.name === "AbortError") facts.textContent = "stopped";
      else [facts.textContent, error.textContent] = ["", problem.message];
    }
  }

  section.querySelector(".start").addEventListener("click", () => {
    clear();
    running.run(work);
  });
  return clear;
}

const TAGS = { same: "span", missing: "del", added: "ins" };

const shown = ({ kind, text }) => Object.assign(document.createElement(TAGS[kind]), { textContent: text });
