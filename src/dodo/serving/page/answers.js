// A question, answered from the nuggets and from the whole text, side by side.

import { overContext } from "./context.js";
import { stream } from "./stream.js";
import { Running } from "./running.js";

const TOKENS = 64; // the paper's limit

/** Answer what is asked in a section. `about` gives the text, its name and the ratio; `model` the model's name and words. Returns how to empty it. */
export function answer(section, model, about) {
  const running = new Running(section);
  const question = section.querySelector("input");
  const cards = [section.querySelector("#from-nuggets"), section.querySelector("#from-whole")];
  section.querySelector("form").addEventListener("submit", (event) => {
    event.preventDefault();
    running.run((signal) => both(question.value.trim(), signal));
  });

  function clear() {
    running.drop();
    cards.forEach(empty);
  }

  async function both(asked, signal) {
    const source = about();
    const fill = filling(signal);
    const [fromNuggets, fromWhole] = cards;
    const begun = Promise.withResolvers(); // the whole text waits for the first word from the nuggets, and slows nothing before it
    const nuggets = fill(fromNuggets, async (into, facts) => {
      const how = { report: (said) => (facts.textContent = said), signal };
      await overContext(source, "questions", how, (id) =>
        stream("v1/chat/completions", { ...request(asked), context_ids: [id] }, { into, facts, signal, first: begun.resolve }),
      );
    }).finally(begun.resolve);
    const whole = fill(fromWhole, async (into, facts) => {
      facts.textContent = "waiting …";
      await begun.promise;
      const words = model.question_prompt.replace("{question}", () => asked);
      const { usage } = await stream("v1/chat/completions", request(`${source.text}\n${words}`.trim()), { into, facts, signal });
      if (usage.prompt_tokens_details.compressed_tokens) facts.append(" · this server compresses long messages, so this is not the whole text");
    });
    await Promise.all([nuggets, whole]);
  }

  const filling = (signal) => async (card, work) => {
    empty(card);
    const [into, facts, error] = places(card);
    try {
      await work(into, facts);
    } catch (problem) {
      if (!running.isLast(signal)) return;
      if (problem.name === "AbortError") facts.textContent = "stopped";
      else [facts.textContent, error.textContent] = ["", problem.message];
    }
  };

  const request = (content) => ({ model: model.id, messages: [{ role: "user", content }], max_tokens: TOKENS });

  return clear;
}

const places = (card) => [".answer", ".facts", ".error"].map((name) => card.querySelector(name));

const empty = (card) => places(card).forEach((place) => (place.textContent = ""));
