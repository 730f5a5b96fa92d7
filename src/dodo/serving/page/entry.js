// Where a text comes in: pasted, typed, dropped, or opened as a file.

/** Hand what comes in to `take`, as {text} or {file}. */
export function listen(form, take) {
  const text = form.querySelector("textarea");
  const file = form.querySelector("input[type=file]");
  const drop = form.querySelector(".drop");
  const carries = (event) => ["Files", "text/plain"].some((kind) => event.dataTransfer.types.includes(kind));

  form.addEventListener("submit", (event) => {
    event.preventDefault();
    take({ text: text.value });
  });
  text.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
  });
  text.addEventListener("paste", () => {
    if (text.value === "") setTimeout(() => form.requestSubmit()); // once the text is there
  });
  file.addEventListener("change", () => {
    if (file.files.length) take({ file: file.files[0] });
    file.value = ""; // so that the same file can be opened again
  });
  drop.addEventListener("dragover", (event) => {
    if (!carries(event)) return;
    event.preventDefault();
    drop.classList.add("over");
  });
  drop.addEventListener("dragleave", (event) => {
    if (!drop.contains(event.relatedTarget)) drop.classList.remove("over");
  });
  drop.addEventListener("drop", (event) => {
    event.preventDefault();
    drop.classList.remove("over");
    const [dropped] = event.dataTransfer.files;
    if (!dropped) text.value = event.dataTransfer.getData("text/plain");
    take(dropped ? { file: dropped } : { text: text.value });
  });
}
