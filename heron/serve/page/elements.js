// Helpers of all modules: elements, formatted numbers, requests and settings. Keys and labels are data
// and may contain markup: every text enters the document as text, never as HTML.

export const byId = (id) => document.getElementById(id);

/** The answer of `/about`, which describes the index; the base path of the index's API; and the
module that answers in place of a server, if the page is a copy without one. */
export const page = { about: null, base: "api", copy: null };

/** Create an element with attributes, listeners (`on...`), and children that are elements or text. */
export function create(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== false && value !== null) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null));
  return element;
}

export const formatNumber = (count) => count.toLocaleString("en");
export const countOf = (count, noun, plural = `${noun}s`) =>
  `${formatNumber(count)} ${count === 1 ? noun : plural}`;

/** The URL of a path of the index's API; empty parameters are left out. */
export function apiUrl(path, parameters = {}) {
  const pairs = Object.entries(parameters).flatMap(([name, value]) =>
    (Array.isArray(value) ? value : [value]).filter((item) => item !== "").map((item) => [name, item]));
  return `${page.base}/${path}${pairs.length ? `?${new URLSearchParams(pairs)}` : ""}`;
}

/** Fetch an answer of the server; an error that it reports is thrown as an Error. */
export async function request(path, options = {}, kind = "json") {
  if (page.copy) return page.copy.answer(path);
  let response, answer;
  try {
    response = await fetch(path, options);
    answer = await (response.ok && kind === "bytes" ? response.arrayBuffer() : response.json());
  } catch (error) {
    if (error.name === "AbortError") throw error;
    const outcome = response ? `answered with status ${response.status}` : "did not answer";
    throw new Error(`The server ${outcome}; check that heron serve is still running.`);
  }
  if (!response.ok) throw new Error(answer.error ?? `The server answered with status ${response.status}.`);
  return answer;
}

/** The URL of a sample's picture of a view, by default the first; it names the index, so that caches
keep indexes apart. */
export const pictureUrl = (sample, view = "") => (page.copy
  ? page.copy.pictureFile(sample, Math.max(0, page.about.picture_views.indexOf(view)))
  : apiUrl(`picture/${sample}`, { view, of: page.about.of }));

/** The picture of every view of a sample, of a size in pixels; a view that it lacks is left out. */
export const pictures = (sample, alt, size, attributes = {}) => {
  const views = page.about.picture_views;
  return views.map((view) => create("img", {
    src: pictureUrl(sample, views.length > 1 ? view : ""), alt: alt && views.length > 1 ? `${alt}, ${view}` : alt,
    title: views.length > 1 && view, width: size, height: size, ...attributes,
    onerror: (event) => views.length > 1 && event.target.remove(),
  }));
};

/** The texts and the numbers of a sample's other views, by name: words, and a line of the numbers. */
export const values = (sample, answer) => Object.entries(answer.values[sample] ?? {}).map(([view, value]) => {
  if (typeof value === "string") return create("q", { class: "words", title: `${view}: ${value}` }, value);
  const [low, high] = [Math.min(0, ...value), Math.max(0, ...value)];
  const at = (x) => 30 - 28 * (x - low) / (high - low || 1);
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("viewBox", `0 0 ${value.length} 32`);
  svg.setAttribute("preserveAspectRatio", "none");
  const bars = document.createElementNS(svg.namespaceURI, "path");
  bars.setAttribute("d", value.map((x, i) => `M${i + 0.5} ${at(0)}V${at(x)}`).join(""));
  svg.append(bars);
  const said = `${view}: ${value.map((x) => x.toPrecision(3)).join(", ")}`;
  return create("span", { class: "numbers", role: "img", title: said, "aria-label": said }, svg);
});

/** A setting that this browser has stored, or the usual value. */
export function loadSetting(name, usual) {
  try {
    return localStorage.getItem(name) ?? usual;
  } catch {
    return usual;
  }
}

/** Store a setting, if the browser allows it. */
export function saveSetting(name, value) {
  try {
    localStorage.setItem(name, value);
  } catch {
    // The setting lasts as long as the page.
  }
}
