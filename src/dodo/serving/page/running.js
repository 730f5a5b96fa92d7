// One piece of work at a time in a section, with a button that stops it.

/** Work of a section; what is begun anew ends what went before. */
export class Running {
  #stop;
  #controller = new AbortController();

  constructor(section) {
    this.#stop = section.querySelector(".stop");
    this.#stop.addEventListener("click", () => this.stop());
  }

  /** Do some work, which is given a signal to end by. */
  async run(work) {
    this.drop();
    const controller = this.#controller;
    this.#stop.hidden = false;
    try {
      await work(controller.signal);
    } finally {
      if (controller === this.#controller) this.#stop.hidden = true;
    }
  }

  /** End what is running. */
  stop() {
    this.#controller.abort();
  }

  /** End what is running, and let it say no more. */
  drop() {
    this.stop();
    this.#controller = new AbortController();
    this.#stop.hidden = true;
  }

  /** Whether this is the signal of what was begun last, so that its work may still say something. */
  isLast(signal) {
    return signal === this.#controller.signal;
  }
}
