"use strict";
const hotloop = (() => {
  const config = {displaylogo: false, displayModeBar: false, responsive: true, plotlyServerURL: "", showSendToCloud: false, scrollZoom: false,
    modeBarButtonsToRemove: ["sendDataToCloud", "editInChartStudio", "lasso2d", "select2d"]};
  const specs = {};
  const colour = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  function themed(layout) {
    const ink = colour("--ink"), line = colour("--line"), panel = colour("--panel");
    const axis = {gridcolor: line, linecolor: line, zerolinecolor: line, color: ink, automargin: true};
    const result = {margin: {l: 50, r: 15, t: 10, b: 45}, legend: {orientation: "h", y: 1.02, yanchor: "bottom"}, ...layout,
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: {color: ink, size: 13},
      hoverlabel: {bgcolor: panel, bordercolor: line, font: {color: ink}}, autosize: true};
    for (const key of Object.keys(result).filter(key => /^[xy]axis\d*$/.test(key)).concat(["xaxis", "yaxis"]))
      result[key] = {...(layout[key] || {}), ...axis};
    if (layout.legend) result.legend = layout.legend;
    return result;
  }
  function draw(element) {
    const spec = specs[element.dataset.figure];
    if (spec) Plotly.react(element, spec.data, themed(spec.layout), config);
  }
  const seen = new IntersectionObserver(entries => {
    for (const entry of entries)
      if (entry.isIntersecting) { seen.unobserve(entry.target); entry.target.dataset.drawn = "yes"; draw(entry.target); }
  }, {rootMargin: "800px"});
  function show(element, spec) {
    specs[element.dataset.figure] = spec;
    if (element.dataset.drawn) draw(element); else seen.observe(element);
  }
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change",
    () => document.querySelectorAll("[data-drawn]").forEach(draw));
  const stored = document.getElementById("figure-specs");
  if (stored) {
    const all = JSON.parse(stored.textContent);
    document.querySelectorAll("[data-figure]").forEach(element => show(element, all[element.dataset.figure]));
  }
  return {show};
})();
