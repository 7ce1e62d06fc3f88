// Requests to this server: the key, JSON, and streams of server-sent events.

const KEY = "icejax-key"; // of sessionStorage, which ends with the tab

export class ServerError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

export function useKey(key) {
  sessionStorage.setItem(KEY, key);
}

async function send(path, body, signal) {
  const headers = body === undefined ? {} : { "Content-Type": "application/json" };
  const key = sessionStorage.getItem(KEY);
  if (key && !/^[\x21-\x7e]+$/.test(key)) throw new ServerError("This key has characters that no key has.", 401);
  if (key) headers.Authorization = `Bearer ${key}`;
  const method = body === undefined ? "GET" : "POST";
  let response;
  try {
    response = await fetch(path, { method, headers, signal, body: body && JSON.stringify(body) });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError("The server cannot be reached.", 0);
  }
  if (response.ok) return response;
  const told = await response.json().catch(() => null);
  throw new ServerError(told?.error?.message ?? `The server answered ${response.status}.`, response.status);
}

/** Returns the JSON of a route; without a body it is a GET. */
export async function ask(path, body) {
  return (await send(path, body)).json();
}

/** Calls `take` with every event of a stream; ends with it, with an error, or when `signal` aborts. */
export async function stream(path, body, signal, take) {
  const response = await send(path, { ...body, stream: true, stream_options: { include_usage: true } }, signal);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) throw new ServerError("The answer was cut.", 0);
    const events = (held + value).split("\n\n");
    held = events.pop();
    for (const event of events) {
      if (!event.startsWith("data: ")) continue; // a comment: the request waits
      const data = event.slice(6);
      if (data === "[DONE]") return;
      const told = JSON.parse(data);
      if (told.error) throw new ServerError(told.error.message, 0);
      take(told);
    }
  }
}
