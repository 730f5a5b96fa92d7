// The text as the server keeps it while this page asks about it: one text at a time, deleted when it is left behind.

import { ApiError, ask, call, events } from "./api.js";

let held = null; // {text, ratio, of: by use, {reports, made: a promise of its id}}

/** The id of the context of a text at a ratio for a use. `report` is told how far compressing has come; `signal` ends the waiting only. */
export function contextOf({ text, name, ratio }, use, { report, signal }) {
  if (held?.text !== text || held.ratio !== ratio) {
    leave();
    held = { text, ratio, of: new Map() };
  }
  const { of } = held;
  if (!of.has(use)) {
    const mine = { reports: new Set() };
    mine.made = make({ text, ratio, use, name: name.slice(0, 200) }, mine.reports);
    mine.made.catch(() => of.get(use) === mine && of.delete(use));
    of.set(use, mine);
  }
  const { made, reports } = of.get(use);
  reports.add(report);
  const givenUp = new Promise((_, reject) => {
    signal.addEventListener("abort", () => {
      reports.delete(report);
      reject(signal.reason);
    });
  });
  return Promise.race([made, givenUp]);
}

/** Do some work over that context; where the server keeps it no more, make it once more first. */
export async function overContext(source, use, how, work) {
  const id = await contextOf(source, use, how);
  try {
    return await work(id);
  } catch (problem) {
    if (problem.code !== "context_not_found") throw problem;
    const gone = held?.of.get(use);
    if (gone && (await gone.made.catch(() => null)) === id) held.of.delete(use);
    return work(await contextOf(source, use, how));
  }
}

/** Delete what is kept. */
export function leave() {
  for (const { made } of held?.of.values() ?? [])
    made.then((id) => ask(`v1/contexts/${id}`, { method: "DELETE", keepalive: true })).catch(() => {}); // it may be gone
  held = null;
}

async function make(json, reports) {
  let id = null;
  for await (const { event, data } of events(await call("v1/contexts", { json, accept: "text/event-stream" }))) {
    if (event === "done") id = data.id;
    const share = data.done === undefined ? "" : ` ${Math.round(100 * data.done)}%`;
    if (event === "progress") for (const report of reports) report(`${data.stage} …${share}`);
  }
  if (id === null) throw new ApiError("the connection ended before the text was compressed; try again");
  return id;
}
