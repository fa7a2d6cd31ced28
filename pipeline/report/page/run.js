// Draws the charts of a report, whose data lie in the page; Plotly is unpacked from it too.
const scheme = matchMedia("(prefers-color-scheme: dark)");
const config = { responsive: true, displaylogo: false, displayModeBar: false };
const held = (element) => JSON.parse(element.querySelector("script").textContent);

function layout(more) {
  const style = getComputedStyle(document.documentElement);
  const color = (name) => style.getPropertyValue(name).trim();
  const axis = { gridcolor: color("--line"), zerolinecolor: color("--line"), automargin: true };
  return {
    autosize: true, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { color: color("--ink"), family: "system-ui, sans-serif", size: 12 },
    colorway: scheme.matches
      ? ["#6cb2ff", "#ffa94d", "#63d38d", "#ff8fa3", "#c4a5ff", "#e0d36a", "#7fe0e0", "#d4a384"]
      : ["#1f6fc4", "#d9730d", "#1a8a4a", "#c92a4b", "#7748c9", "#8a7a00", "#0a8080", "#8a5a3b"],
    margin: { l: 44, r: 12, t: 8, b: 34 }, showlegend: false,
    hoverlabel: { font: { family: "system-ui, sans-serif" } },
    ...more,
    xaxis: { ...axis, ...more.xaxis }, yaxis: { ...axis, ...more.yaxis },
  };
}

function draw(element) {
  const { traces, layout: more, links } = held(element);
  const legend = more.showlegend ?? (traces.length > 1)
    ? { showlegend: true, legend: { orientation: "h", y: 1.12 } } : {};
  const height = more.height ?? 230;
  const begun = element.classList.contains("js-plotly-plot");
  Plotly.react(element, traces, layout({ height, ...legend, ...more }), config);
  if (links.length && !begun) element.on("plotly_click", ({ points: [{ pointIndex: [row, column] }] }) => {
    if (links[row][column]) open(links[row][column], "_blank", "noopener");
  });
}

// One trace a value of the label, or a class, so that each has its colour and its legend's line.
function drawMap(element) {
  const map = held(element), chosen = document.getElementById("colour")?.value;
  const groups = new Map();
  const name = (i) => {
    if (map.classes) return map.classes[i];
    if (chosen === undefined) return "rows";
    return { 1: chosen, 0: `not ${chosen}`, "-1": "unknown" }[map.labels[chosen][i]];
  };
  map.x.forEach((_, i) => {
    const key = name(i);
    if (!groups.has(key)) groups.set(key, []);
    groups.get(key).push(i);
  });
  const quiet = (key) => !map.classes && key !== chosen && chosen !== undefined;
  const order = [...groups.keys()].sort((a, b) => quiet(b) - quiet(a) || (a < b ? -1 : 1));
  const traces = order.map((key) => ({
    type: "scattergl", mode: "markers", name: `${key} (${groups.get(key).length})`,
    x: groups.get(key).map((i) => map.x[i]), y: groups.get(key).map((i) => map.y[i]),
    text: groups.get(key).map((i) => map.hover[i]), hoverinfo: "text",
    marker: quiet(key) ? { size: 6, color: "rgba(128,128,128,.35)" } : { size: 7, opacity: 0.85 },
  }));
  const bare = { visible: false };
  Plotly.react(element, traces, layout({
    xaxis: bare, yaxis: bare, showlegend: true, legend: { orientation: "h" }, dragmode: "pan",
    margin: { l: 4, r: 4, t: 4, b: 4 },
  }), { ...config, scrollZoom: true });
}

async function start() {
  const packed = atob(document.getElementById("plotly").textContent);
  const bytes = Uint8Array.from(packed, (c) => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  const script = document.createElement("script");
  script.textContent = await new Response(stream).text();
  document.head.append(script);
  const map = document.getElementById("map");
  const all = () => {
    document.querySelectorAll(".chart .plot").forEach(draw);
    if (map) drawMap(map);
  };
  all();
  scheme.addEventListener("change", all);
  document.getElementById("colour")?.addEventListener("change", () => drawMap(map));
  document.documentElement.dataset.drawn = "yes";
}
start();
