// The slider: a few ratios, closer together where they differ most.

const STOPS = [1, 1.5, 2, 2.5, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32];

/** Set up the slider for a model, and call `moved` with the ratio whenever it is another one. Returns the first. */
export function slide(input, output, { ratio, trained_ratios: trained }, moved) {
  const [, most] = trained ?? [1, STOPS.at(-1)];
  const stops = [...new Set([...STOPS, ratio ?? 10])].filter((stop) => stop <= most).sort((a, b) => a - b);
  const show = () => {
    const now = stops[input.value];
    output.textContent = now;
    input.setAttribute("aria-valuetext", now === 1 ? "1: every token is kept" : `${now}: one token in ${now} is kept`);
    return now;
  };
  input.max = stops.length - 1;
  input.value = stops.indexOf(Math.min(ratio ?? 10, stops.at(-1)));
  input.addEventListener("input", () => moved(show()));
  return show();
}
