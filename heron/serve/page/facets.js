// Labels with their counts. A click restricts the samples to those with a label, or without it; the
// choice is written into the filter, which can be edited as text too.

import { currentQuery, navigate } from "./address.js";
import { apiUrl, byId, countOf, create, formatNumber, page, request } from "./elements.js";

const RESERVED = /^(and|or|not)$/i;
let pending = new AbortController(); // of the last request for counts

/** A label as it is written in a filter. */
function quoted(name) {
  const plain = /^[^\s'"&|!()]+$/.test(name) && !RESERVED.test(name);
  return plain ? name : `'${name.replaceAll("'", "''")}'`;
}

/** The terms of a filter that `and` joins; a filter with an `or` is a single term. */
function terms(where) {
  const text = where.trim();
  const joined = [];
  let depth = 0, from = 0;
  for (const match of text.matchAll(/'(?:[^']|'')*'|"(?:[^"]|"")*"|[()]|[^\s'"()]+/g)) {
    const [word] = match;
    depth += (word === "(") - (word === ")");
    if (depth || /^['"]/.test(word)) continue; // the name of a label may contain any character
    if (/^or$|[&|!]/i.test(word)) return [`(${text})`];
    if (/^and$/i.test(word)) {
      joined.push(text.slice(from, match.index).trim());
      from = match.index + word.length;
    }
  }
  return [...joined, text.slice(from).trim()].filter(Boolean);
}

/** Require a label in the filter, or its absence; drop the condition if the filter has it already.

The filter requires at most one class, as a sample has only one. */
export function toggle(name, without = false) {
  const term = `${without ? "not " : ""}${quoted(name)}`;
  const opposite = `${without ? "" : "not "}${quoted(name)}`;
  const before = terms(currentQuery().where);
  const classes = page.about.exclusive && !without ? new Set(page.about.names.map(quoted)) : new Set();
  const others = before.filter((other) => other !== term && other !== opposite && !classes.has(other));
  const after = before.includes(term) ? others : [...others, term];
  const parenthesised = after.length === 1 && /^\((.*)\)$/.exec(after[0]);
  navigate({ where: parenthesised ? parenthesised[1] : after.join(" and ") });
}

/** A button with a label's name, which restricts the samples to those with the label. */
export const filterButton = (name) => create("button", {
  type: "button", title: `Only samples with ${name}`, onclick: () => toggle(name),
}, name);

/** Draw the labels with their counts among the samples that pass filter and outline. */
export async function drawFacets() {
  const { names, facets, count } = page.about;
  byId("facets").hidden = !names.length || page.copy !== null;
  if (byId("facets").hidden) return;
  const { where, lasso } = currentQuery();
  pending.abort();
  pending = new AbortController();
  let answer;
  try {
    answer = await request(apiUrl("facets", { where, lasso }), { signal: pending.signal });
  } catch (error) {
    if (error.name !== "AbortError") byId("facets-note").textContent = error.message;
    return;
  }
  const active = new Set(terms(where));
  const largest = Math.max(1, ...answer.counts);
  const focused = document.activeElement?.dataset.facet;
  const rows = names.slice(0, facets).map((name, i) => {
    const button = (without, text, title) => create("button", {
      type: "button", title, "aria-label": title, "data-facet": `${without}${name}`,
      "aria-pressed": active.has(`${without ? "not " : ""}${quoted(name)}`),
      onclick: () => toggle(name, without),
    }, text);
    const row = create("li", {}, button(false, name, `Only samples with ${name}`),
      create("span", {}, formatNumber(answer.counts[i])),
      button(true, "−", `Only samples without ${name}`));
    row.style.setProperty("--share", `${(100 * answer.counts[i]) / largest}%`);
    return row;
  });
  const unlisted = names.length - rows.length;
  byId("facets-note").textContent = (answer.allowed < count
    ? `Among ${formatNumber(answer.allowed)} of ${countOf(count, "sample")}.`
    : `Among all ${countOf(count, "sample")}.`)
    + (unlisted ? ` ${countOf(unlisted, "more label")} can be typed into the filter.` : "");
  byId("facets").querySelector("ul").replaceChildren(...rows);
  // The button that had the focus has been replaced.
  if (focused) rows.flatMap((row) => [...row.children]).find((child) => child.dataset.facet === focused)?.focus();
}
