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
    this.stop();
    const controller = (this.#controller = new AbortController());
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
}
