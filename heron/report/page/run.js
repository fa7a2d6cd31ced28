// Draws the charts of a report. Their data and Plotly itself are embedded in the page.
const scheme = matchMedia("(prefers-color-scheme: dark)");
const config = { responsive: true, displaylogo: false, displayModeBar: false };
const dataOf = (element) => JSON.parse(element.querySelector("script").textContent);

function layout(options) {
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
    ...options,
    xaxis: { ...axis, ...options.xaxis }, yaxis: { ...axis, ...options.yaxis },
  };
}

function draw(element) {
  const { traces, layout: options, links } = dataOf(element);
  const legend = options.showlegend ?? (traces.length > 1)
    ? { showlegend: true, legend: { orientation: "h", y: 1.12 } } : {};
  const height = options.height ?? 230;
  const drawnBefore = element.classList.contains("js-plotly-plot");
  Plotly.react(element, traces, layout({ height, ...legend, ...options }), config);
  if (links.length && !drawnBefore) element.on("plotly_click", ({ points: [{ pointIndex: [row, column] }] }) => {
    if (links[row][column]) open(links[row][column], "_blank", "noopener");
  });
}

// One trace per class, or per value of the selected label, so that each has a colour and a legend entry.
function drawMap(element) {
  const map = dataOf(element), label = document.getElementById("colour")?.value;
  const groups = new Map();
  const groupName = (i) => {
    if (map.classes) return map.classes[i];
    if (label === undefined) return "rows";
    return { 1: label, 0: `not ${label}`, "-1": "unknown" }[map.labels[label][i]];
  };
  map.x.forEach((_, i) => {
    const name = groupName(i);
    if (!groups.has(name)) groups.set(name, []);
    groups.get(name).push(i);
  });
  const muted = (name) => !map.classes && name !== label && label !== undefined;
  const order = [...groups.keys()].sort((a, b) => muted(b) - muted(a) || (a < b ? -1 : 1));
  const traces = order.map((name) => ({
    type: "scattergl", mode: "markers", name: `${name} (${groups.get(name).length})`,
    x: groups.get(name).map((i) => map.x[i]), y: groups.get(name).map((i) => map.y[i]),
    text: groups.get(name).map((i) => map.hover[i]), hoverinfo: "text",
    marker: muted(name) ? { size: 6, color: "rgba(128,128,128,.35)" } : { size: 7, opacity: 0.85 },
  }));
  const hidden = { visible: false };
  Plotly.react(element, traces, layout({
    xaxis: hidden, yaxis: hidden, showlegend: true, legend: { orientation: "h" }, dragmode: "pan",
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
  const drawAll = () => {
    document.querySelectorAll(".chart .plot").forEach(draw);
    if (map) drawMap(map);
  };
  drawAll();
  scheme.addEventListener("change", drawAll);
  document.getElementById("colour")?.addEventListener("change", () => drawMap(map));
  document.documentElement.dataset.drawn = "yes";
}
start();
