// How a rebuilt text differs from the text, word by word: a longest common subsequence.

const MOST = 16_000_000; // entries of the table

/**
 * The two texts as one: {parts: [{kind: "same" | "missing" | "added", text}], same, all}, where `same` of the original's `all`
 * words are right; null where they are too long to compare.
 */
export function difference(original, rebuilt) {
  const [a, b] = [words(original), words(rebuilt)];
  const width = b.length + 1;
  if ((a.length + 1) * width > MOST) return null;
  const common = table(a, b, width);
  const parts = [];
  const push = (kind, word) => {
    const text = word.text + word.space;
    if (parts.at(-1)?.kind === kind) parts.at(-1).text += text;
    else parts.push({ kind, text });
  };
  for (let i = 0, j = 0; i < a.length || j < b.length; ) {
    if (i < a.length && j < b.length && a[i].text === b[j].text) {
      push("same", a[i++]);
      j++;
    } else if (j === b.length || (i < a.length && common[(i + 1) * width + j] >= common[i * width + j + 1])) {
      push("missing", a[i++]);
    } else {
      push("added", b[j++]);
    }
  }
  return { parts, same: common[0], all: a.length };
}

/** At i, j: how many words the rests from there on have in common. */
function table(a, b, width) {
  const common = new Uint16Array((a.length + 1) * width);
  for (let i = a.length - 1; i >= 0; i--) {
    for (let j = b.length - 1; j >= 0; j--) {
      const here = i * width + j;
      common[here] = a[i].text === b[j].text ? common[here + width + 1] + 1 : Math.max(common[here + width], common[here + 1]);
    }
  }
  return common;
}

/** The words of a text with the space behind them; the last has one too, so that whatever comes behind it stands apart. */
const words = (text) => [...text.matchAll(/(\S+)(\s*)/g)].map(([, word, space]) => ({ text: word, space: space || " " }));
