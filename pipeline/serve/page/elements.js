// What all parts of the page use: elements, numbers in words, and requests. Keys and labels are data
// that may hold markup: every text enters the document as text, never as HTML.

export const at = (id) => document.getElementById(id);

/** What is known of the index, once `/about` has answered; `base` is the path of its API. */
export const page = { about: null, base: "/api" };

/** An element with attributes, and children that are elements or text. */
export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== false && value !== null) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null));
  return element;
}

export const number = (count) => count.toLocaleString("en");
export const counted = (count, noun, plural = `${noun}s`) =>
  `${number(count)} ${count === 1 ? noun : plural}`;

/** A path of the index's API with its parameters, of which the empty ones are left out. */
export function api(path, parameters = {}) {
  const pairs = Object.entries(parameters).flatMap(([name, value]) =>
    (Array.isArray(value) ? value : [value]).filter((one) => one !== "").map((one) => [name, one]));
  return `${page.base}/${path}${pairs.length ? `?${new URLSearchParams(pairs)}` : ""}`;
}

/** The answer of the server; its error in words is thrown as an Error. */
export async function ask(path, options = {}, kind = "json") {
  let response, answer;
  try {
    response = await fetch(path, options);
    answer = await (response.ok && kind === "bytes" ? response.arrayBuffer() : response.json());
  } catch (error) {
    if (error.name === "AbortError") throw error;
    const found = response ? `status ${response.status}` : "no answer";
    throw new Error(`The server gave ${found}; see whether heron serve still runs.`);
  }
  if (!response.ok) throw new Error(answer.error ?? `The server gave status ${response.status}.`);
  return answer;
}

/** The address of a sample's picture; it names the index, so that a cache holds pictures of it. */
export const source = (sample) => api(`picture/${sample}`, { of: page.about.of });

/** A setting of this browser; where it keeps none, the usual one. */
export function remembered(name, usual) {
  try {
    return localStorage.getItem(name) ?? usual;
  } catch {
    return usual;
  }
}

/** Keep a setting, where the browser keeps any. */
export function remember(name, value) {
  try {
    localStorage.setItem(name, value);
  } catch {
    // It holds until the page goes.
  }
}
