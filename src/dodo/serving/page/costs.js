// What the nuggets of a text cost, against the cache of the whole.

/** Show the figures of an inspection. */
export function showCosts(root, seen) {
  const figures = {
    k: count(seen.k),
    n: count(seen.n),
    states: count(seen.states),
    ratio: seen.ratio.toFixed(2),
    bytes: bytes(seen.bytes),
    full_bytes: bytes(seen.full_bytes),
  };
  for (const [name, text] of Object.entries(figures)) {
    const place = root.querySelector(`[data-cost=${name}]`);
    place.textContent = text;
    place.dataset.value = seen[name];
  }
  root.querySelector(".held").style.width = `${(100 * seen.bytes) / seen.full_bytes}%`;
}

/** A number with its thousands apart. */
export const count = (number) => number.toLocaleString("en");

/** Bytes for people. */
export function bytes(number) {
  const units = ["bytes", "kB", "MB", "GB"];
  let unit = 0;
  for (; number >= 1000 && unit < units.length - 1; unit++) number /= 1000;
  return `${unit ? Number(number.toPrecision(3)) : number} ${units[unit]}`;
}
