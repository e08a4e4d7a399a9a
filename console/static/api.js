// Requests to the console's own API, and nowhere else.

const HEADERS = { "X-Tidelog-Console": "1" };

export class ApiError extends Error {
  constructor(status, message, hint) {
    super(message);
    this.status = status;
    this.hint = hint;
  }
}

async function request(method, path, { params, body, signal } = {}) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(params || {})) {
    for (const each of Array.isArray(value) ? value : [value]) {
      if (each !== undefined && each !== null && each !== "") query.append(name, each);
    }
  }
  const headers = body === undefined ? HEADERS : { ...HEADERS, "Content-Type": "application/json" };
  const text = query.toString();
  let response;
  try {
    response = await fetch(`api/${path}${text ? `?${text}` : ""}`, {
      method, headers, signal, credentials: "same-origin", cache: "no-store",
      body: body === undefined ? undefined : JSON.stringify(body),
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "The console does not answer.", "Is its process still running? The page tries again by itself.");
  }
  if (response.ok) return response;
  let told = {};
  try {
    told = await response.json();
  } catch {
    // no JSON: the status is all there is
  }
  if (response.status === 401) dispatchEvent(new CustomEvent("signed-out"));
  throw new ApiError(response.status, told.error || `answered with ${response.status}`, told.hint);
}

export async function get(path, params, signal) {
  return (await request("GET", path, { params, signal })).json();
}

export async function post(path, body) {
  return (await request("POST", path, { body })).json();
}

export async function remove(path) {
  return (await request("DELETE", path)).json();
}

export const any = (path, params, signal) => get(`read/any/${path}`, params, signal);
export const all = (path, params, signal) => get(`read/all/${path}`, params, signal);
export const of = (broker, path, params, signal) => get(`read/${broker}/${path}`, params, signal);
export const change = (path, query, body) => post(`change/${path}`, { query: query || {}, body: body === undefined ? null : body });

// Calls `line` for each line of JSON as it comes. An error that came after the first one is thrown as one before it is.
export async function stream(path, params, signal, line) {
  const response = await request("GET", path, { params, signal });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) break;
    const parts = (rest + value).split("\n");
    rest = parts.pop();
    for (const part of parts) {
      if (!part) continue;
      const told = JSON.parse(part);
      if (told.event === "error") throw new ApiError(response.status, told.error, told.hint);
      line(told);
    }
  }
}
