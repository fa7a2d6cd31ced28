// The page that goes through the labels of an audit: one at a time, a key for each decision.

import { byId, countOf, create, formatNumber, request, values } from "./elements.js";

const KEYS = { r: "right", w: "wrong", u: "unknown", d: "drop", s: "skip" };
let audit = null; // the answer of `lines`
let order = []; // numbers of the lines of the chosen label
let at = 0; // a place in it
let sent = Promise.resolve(); // settles when all decisions so far are written

const lineAt = () => {
  const [key, label, given, likely, suspicion, decision] = audit.lines[order[at]];
  return { number: order[at], key, label, given, likely, suspicion, decision };
};

/** What is asked of a line: does the sample have the label, or is it of the class? */
function question({ label, given, likely }) {
  if (!label) return `${given}? More likely ${likely}`;
  return given === "1" ? `Has ${label}? More likely not` : `Lacks ${label}? More likely has it`;
}

function showProgress() {
  const lines = order.map((number) => audit.lines[number]);
  const decided = lines.filter((line) => line[5] && line[5] !== "skip").length;
  byId("progress").textContent =
    `${formatNumber(at + 1)} of ${countOf(order.length, "label")}, ${formatNumber(decided)} decided`;
}

async function show() {
  const line = lineAt();
  showProgress();
  byId("question").textContent = question(line);
  byId("detail").textContent = `Sample ${line.key}, suspicion ${Number(line.suspicion).toFixed(3)}`;
  for (const button of byId("choices").children)
    button.setAttribute("aria-pressed", button.dataset.choice === line.decision);
  byId("pictures").replaceChildren(...audit.views.map((view) => create("img", {
    src: `api/picture/${line.number}?${new URLSearchParams({ view })}`,
    alt: audit.views.length > 1 ? `${line.key}, ${view}` : line.key,
    onerror: (event) => event.target.remove(),
  })));
  byId("values").replaceChildren();
  const answer = await request(`api/values/${line.number}`);
  if (line.number === order[at]) byId("values").replaceChildren(...values(0, { values: [answer.values] }));
}

function move(step) {
  at = Math.min(order.length - 1, Math.max(0, at + step));
  return show();
}

/** Go to the first line of the chosen label without a decision, or to the first. */
function choose(label) {
  order = audit.lines.flatMap((line, number) => (label === "" || line[1] === label ? [number] : []));
  at = Math.max(0, order.findIndex((number) => audit.lines[number][5] === ""));
  return show();
}

/** Decide on the line that is shown, and go on; decisions are written one after another, and one that
cannot be written is shown again, as it was. */
function decide(choice) {
  const { number, decision } = lineAt();
  audit.lines[number][5] = choice;
  sent = sent.then(() => request(`api/decide/${number}?${new URLSearchParams({ choice })}`, {
    method: "POST", headers: { "Content-Type": "application/octet-stream" },
  })).catch(async (error) => {
    audit.lines[number][5] = decision;
    if (order.includes(number)) at = order.indexOf(number);
    await attempt(show);
    byId("fault").textContent = error.message;
    byId("fault").hidden = false;
  });
  return move(1);
}

/** Run what a person asked for; a failure is shown, and nothing is taken for decided. */
async function attempt(action) {
  byId("fault").hidden = true;
  try {
    await action();
  } catch (error) {
    byId("fault").textContent = error.message;
    byId("fault").hidden = false;
  }
}

async function start() {
  audit = await request("api/lines");
  byId("name").textContent = audit.name;
  byId("why").firstElementChild.textContent = audit.why;
  if (!audit.lines.length) {
    byId("line").hidden = true;
    throw new Error("The audit lists no label to decide on.");
  }
  byId("choices").replaceChildren(...Object.entries(KEYS).map(([key, choice]) => create("button", {
    "data-choice": choice, "aria-keyshortcuts": key, onclick: () => attempt(() => decide(choice)),
  }, create("kbd", {}, key), ` ${choice}`)));
  const labels = [...new Set(audit.lines.map((line) => line[1]))].sort();
  byId("labels").hidden = labels.length < 2;
  byId("label").replaceChildren(create("option", { value: "" }, "all"),
    ...labels.map((label) => create("option", { value: label }, label)));
  byId("label").addEventListener("change", (event) => attempt(() => choose(event.target.value)));
  byId("back").addEventListener("click", () => attempt(() => move(-1)));
  byId("on").addEventListener("click", () => attempt(() => move(1)));
  document.addEventListener("keydown", (event) => {
    if (event.repeat || event.ctrlKey || event.metaKey || event.altKey || event.target.tagName === "SELECT") return;
    if (KEYS[event.key]) attempt(() => decide(KEYS[event.key]));
    else if (event.key === "ArrowLeft" || event.key === "ArrowRight")
      attempt(() => move(event.key === "ArrowLeft" ? -1 : 1));
  });
  await choose("");
}

attempt(start);
