// Figure 7: the text, its tokens shaded by their scores, the nuggets marked.
// A text has thousands of tokens: they are built in one go, and listened to together.

/** A view of one text at a time. */
export class Tokens {
  #root;
  #caption;
  #table;
  #spans = [];
  #elements = [];
  #selected = new Set();

  constructor({ root, caption, table }) {
    [this.#root, this.#caption, this.#table] = [root, caption, table];
    for (const kind of ["pointerover", "click"]) root.addEventListener(kind, (event) => this.#explain(event.target));
    table.addEventListener("toggle", () => this.#tabulate());
  }

  /** Show a text, none of it marked. */
  show(spans) {
    const whole = document.createDocumentFragment();
    this.#spans = spans;
    this.#elements = spans.map((span, number) => {
      const [, before, core, after] = /^(\s*)(.*?)(\s*)$/s.exec(span.text);
      const element = document.createElement("span");
      element.className = `g${span.shade}`;
      element.dataset.span = number;
      element.textContent = core || span.text;
      if (span.mark) element.dataset.mark = span.mark;
      if (core) whole.append(before, element, after);
      else whole.append(element);
      return element;
    });
    this.#root.replaceChildren(whole);
    this.#root.scrollTop = 0;
  }

  /** Mark the tokens that are kept. */
  mark(selected) {
    this.#selected = new Set(selected);
    this.#spans.forEach((span, i) => this.#elements[i].classList.toggle("nugget", this.#isKept(span)));
    this.#tabulate();
  }

  #isKept(span) {
    return span.tokens.some((token) => this.#selected.has(token.index));
  }

  #explain(element) {
    const span = this.#spans[element.dataset.span];
    if (!span) return;
    const scores = span.tokens.map(({ score, rank }) => `score ${score.toFixed(2)}, rank ${rank.toLocaleString("en")}`).join("; ");
    this.#caption.textContent = `${named(span)}: ${scores}${this.#isKept(span) ? ", kept" : ""}`;
  }

  #tabulate() {
    if (!this.#table.open) return;
    const rows = document.createDocumentFragment();
    for (const span of this.#spans) {
      for (const token of span.tokens.filter(({ index }) => this.#selected.has(index))) {
        const row = document.createElement("tr");
        for (const text of [token.index, named(span), token.score.toFixed(4), token.rank]) {
          row.append(Object.assign(document.createElement("td"), { textContent: text }));
        }
        rows.append(row);
      }
    }
    this.#table.querySelector("tbody").replaceChildren(rows);
  }
}

const named = (span) => span.text.trim() || (span.mark === " " ? "␣" : span.mark || "␣");
