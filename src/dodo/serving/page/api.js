// The server's API: calls, streams, and errors in its own words.

const KEY = "dodo-key";

/** What the server said was wrong; `code` is its name for it. */
export class ApiError extends Error {
  constructor(message, code = null) {
    super(message);
    this.code = code;
  }
}

/** Use this key until the tab is closed. */
export const useKey = (key) => sessionStorage.setItem(KEY, key);

/**
 * Ask for a path of the API, with a JSON body, a form, or none.
 * Throws ApiError; where a key is wanted, `document` also gets a "locked" event.
 */
export async function call(path, { method, json, form, accept, signal, keepalive } = {}) {
  const headers = new Headers(accept && { Accept: accept });
  const key = sessionStorage.getItem(KEY);
  if (key) headers.set("Authorization", `Bearer ${key}`);
  if (json) headers.set("Content-Type", "application/json");
  const body = json ? JSON.stringify(json) : form;
  let response;
  try {
    response = await fetch(path, { method: method ?? (body ? "POST" : "GET"), headers, body, signal, keepalive });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("the server can't be reached; look whether it is still running");
  }
  if (response.ok) return response;
  const said = await response.json().catch(() => null);
  const message = said?.error?.message ?? `the server answered with status ${response.status}`;
  if (response.status === 401) document.dispatchEvent(new CustomEvent("locked", { detail: { tried: Boolean(key) } }));
  throw new ApiError(message, said?.error?.code);
}

/** The answer to a call, as JSON. */
export const ask = async (path, options) => (await call(path, options)).json();

/** Server-sent events of a response, as {event, data}, until it ends or says [DONE]. Throws the error that one of them tells. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const blocks = (held + value).split("\n\n");
      held = blocks.pop();
      for (const block of blocks) {
        const fields = Object.fromEntries(block.split("\n").map((line) => line.split(/: (.*)/s)));
        if (fields.data === "[DONE]") return;
        const data = JSON.parse(fields.data);
        if (data.error) throw new ApiError(data.error.message, data.error.code);
        yield { event: fields.event, data };
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
