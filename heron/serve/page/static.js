// Answers the page's requests from the files of `heron serve --export`, where no server searches.

import { apiUrl, page } from "./elements.js";

const BLOCK = 100; // samples of a file
const files = new Map(); // what has been asked for, by its address

/** Fetch a file once; one that failed is fetched again the next time. */
function load(path, kind = "json") {
  if (!files.has(path)) {
    const answer = fetch(path).then((response) => {
      if (!response.ok) throw new Error(`${path} is missing from this page: status ${response.status}.`);
      return kind === "bytes" ? response.arrayBuffer() : response.json();
    });
    answer.catch(() => files.delete(path));
    files.set(path, answer);
  }
  return files.get(path);
}

const loadSamples = () => load("data/samples.json");
const labelsOf = (samples, number) => (samples.of[number] ?? []).map((label) => page.about.names[label]);

/** The number of the sample with a key; zeros before a number may be left out. */
function find({ keys }, key) {
  const padded = /^\d+$/.test(key) ? key.padStart(keys[0].length, "0") : key;
  const number = [key, padded].map((text) => keys.indexOf(text)).find((found) => found >= 0);
  if (number === undefined) throw new Error(`No sample has the key '${key}'.`);
  return number;
}

/** The texts and numbers of samples, by number. */
async function valuesOf(numbers) {
  const blocks = [...new Set(numbers.map((number) => Math.floor(number / BLOCK)))];
  const loaded = await Promise.all(blocks.map((block) => load(`data/values/${block}.json`).catch(() => ({}))));
  const all = Object.assign({}, ...loaded);
  return Object.fromEntries(numbers.filter((number) => number in all).map((number) => [number, all[number]]));
}

async function neighbours(parameters) {
  const given = parameters.getAll("key"), relation = parameters.get("relation"), k = Number(parameters.get("k"));
  if (given.length > 1) throw new Error("This page has answers for one sample at a time; heron serve takes several.");
  const samples = await loadSamples(), number = find(samples, given[0]);
  const stored = (await load(`data/answers/${Math.floor(number / BLOCK)}.json`))[number % BLOCK][relation];
  if (stored === undefined) throw new Error(`'${samples.keys[number]}' has no labels, so it has no such negatives.`);
  if (typeof stored === "string") throw new Error(stored);
  const hits = stored.hits.slice(0, k).map(([other, score, distance]) => ({
    number: other, key: samples.keys[other], score, labels: labelsOf(samples, other), label_distance: distance,
  }));
  const query = {
    number, key: samples.keys[number], labels: labelsOf(samples, number), labelled: samples.of[number] !== null,
    examples: [], keys: [], predicted: {}, voters: 0, compares: stored.compares,
  };
  const values = page.about.values ? await valuesOf([number, ...hits.map((hit) => hit.number)]) : {};
  return { ...stored, query, hits, values, relation, k, where: "", metric: page.about.metric };
}

/** One byte per sample, as the server's `/colours`: see `Selection.colours`. */
async function colours(label) {
  const { of } = await loadSamples(), { classes } = page.about;
  const rank = new Map(classes.map((name, i) => [name, i]));
  const code = (labels) => (label === null ? rank.get(labels[0]) ?? classes.length : Number(labels.includes(Number(label))));
  return Uint8Array.from(of, (labels) => (labels === null ? 255 : code(labels))).buffer;
}

async function suggest(part) {
  const { keys } = await loadSamples();
  const found = keys.filter((key) => key.includes(part));
  const first = keys.includes(part) ? [part] : [];
  return [...new Set([...first, ...found.filter((key) => key.startsWith(part)), ...found])].slice(0, 20);
}

/** The answer to a request of the page. */
export async function answer(url) {
  const [path, query = ""] = url.slice(apiUrl("").length).split("?");
  const parameters = new URLSearchParams(query), [name, number] = path.split("/");
  switch (name) {
    case "about": return load("data/about.json");
    case "map": return load("data/map.bin", "bytes");
    case "neighbours": return neighbours(parameters);
    case "colours": return colours(parameters.get("label"));
    case "samples": return { keys: await suggest(parameters.get("part") ?? "") };
    case "sample": return { key: (await loadSamples()).keys[number] };
    case "random": {
      const { keys } = await loadSamples();
      return { key: keys[Math.floor(Math.random() * keys.length)] };
    }
    default: throw new Error("This copy of the page cannot search; heron serve can.");
  }
}

/** The address of the picture of a view, given by its number. */
export const pictureFile = (sample, view) => `data/pictures/${view}/${Math.floor(sample / BLOCK)}/${sample}.jpg`;
