// Labels with their counts; a click has only samples with one, or only samples without it. What is
// chosen is written into the filter, which can be edited as text too.

import { asked, go } from "./address.js";
import { api, ask, at, counted, make, number, page } from "./elements.js";

const RESERVED = /^(and|or|not)$/i;
let asking = new AbortController();

/** A label as a filter has it. */
function quoted(name) {
  const plain = /^[^\s'"&|!()]+$/.test(name) && !RESERVED.test(name);
  return plain ? name : `'${name.replaceAll("'", "''")}'`;
}

/** The parts of a filter that `and` joins; one part where it has an `or`. */
function terms(where) {
  const text = where.trim();
  const parts = [];
  let depth = 0, from = 0;
  for (const found of text.matchAll(/'(?:[^']|'')*'|"(?:[^"]|"")*"|[()]|[^\s'"()]+/g)) {
    const [word] = found;
    depth += (word === "(") - (word === ")");
    if (depth || /^['"]/.test(word)) continue; // the name of a label may have any sign
    if (/^or$|[&|!]/i.test(word)) return [`(${text})`];
    if (/^and$/i.test(word)) {
      parts.push(text.slice(from, found.index).trim());
      from = found.index + word.length;
    }
  }
  return [...parts, text.slice(from).trim()].filter(Boolean);
}

/** Have the filter ask for a label, or for its absence, or for neither if it does already.

Of classes, of which a sample has one, it asks for one at most. */
export function toggle(name, without = false) {
  const wanted = `${without ? "not " : ""}${quoted(name)}`;
  const other = `${without ? "" : "not "}${quoted(name)}`;
  const before = terms(asked().where);
  const classes = page.about.exclusive && !without ? new Set(page.about.names.map(quoted)) : new Set();
  const rest = before.filter((term) => term !== wanted && term !== other && !classes.has(term));
  const found = before.includes(wanted) ? rest : [...rest, wanted];
  const alone = found.length === 1 && /^\((.*)\)$/.exec(found[0]);
  go({ where: alone ? alone[1] : found.join(" and ") });
}

/** A button with a label's name, which has only samples with it. */
export const chip = (name) => make("button", {
  type: "button", title: `Only samples with ${name}`, onclick: () => toggle(name),
}, name);

/** Count and draw the labels among the samples that pass filter and outline. */
export async function drawFacets() {
  const { names, facets, count } = page.about;
  at("facets").hidden = !names.length;
  if (!names.length) return;
  const { where, lasso } = asked();
  asking.abort();
  asking = new AbortController();
  let found;
  try {
    found = await ask(api("facets", { where, lasso }), { signal: asking.signal });
  } catch (error) {
    if (error.name !== "AbortError") at("facets-note").textContent = error.message;
    return;
  }
  const chosen = new Set(terms(where));
  const most = Math.max(1, ...found.counts);
  const focused = document.activeElement?.dataset.facet;
  const rows = names.slice(0, facets).map((name, place) => {
    const button = (without, text, title) => make("button", {
      type: "button", title, "aria-label": title, "data-facet": `${without}${name}`,
      "aria-pressed": chosen.has(`${without ? "not " : ""}${quoted(name)}`),
      onclick: () => toggle(name, without),
    }, text);
    const row = make("li", {}, button(false, name, `Only samples with ${name}`),
      make("span", {}, number(found.counts[place])),
      button(true, "−", `Only samples without ${name}`));
    row.style.setProperty("--share", `${(100 * found.counts[place]) / most}%`);
    return row;
  });
  const left = names.length - rows.length;
  at("facets-note").textContent = (found.allowed < count
    ? `Of ${number(found.allowed)} of ${counted(count, "sample")}.` : `Of all ${counted(count, "sample")}.`)
    + (left ? ` ${counted(left, "other")} can be written into the filter.` : "");
  at("facets").querySelector("ul").replaceChildren(...rows);
  // What had the focus was drawn anew.
  if (focused) rows.flatMap((row) => [...row.children]).find((one) => one.dataset.facet === focused)?.focus();
}
