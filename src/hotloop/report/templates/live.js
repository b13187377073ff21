"use strict";
(() => {
  const token = new URLSearchParams(location.search).get("token");
  const status = document.getElementById("connection");
  let received = Date.now();
  const report = line => { if (status.textContent !== line) status.textContent = line; };
  const number = (value, digits) => value == null ? "" : String(Number(Number(value).toPrecision(digits)));
  const duration = s => s == null ? "" : s < 60 ? `${Math.round(s)} s` : s < 3600 ? `${Math.round(s / 60)} min` : `${(s / 3600).toFixed(1)} h`;
  function addCell(row, text, isNumber) {
    const cell = document.createElement("td");
    if (isNumber) cell.className = "number";
    cell.textContent = text;
    row.append(cell);
    return cell;
  }
  function tableRow(run) {
    const row = document.createElement("tr"), name = addCell(row, "");
    const link = document.createElement("a");
    link.textContent = run.run;
    link.href = `/report?token=${encodeURIComponent(token)}&run=${encodeURIComponent(run.run)}`;
    name.append(link);
    if (run.message) {
      const note = document.createElement("p");
      note.textContent = run.message;
      name.append(note);
    }
    const badge = document.createElement("span");
    badge.className = `state state-${run.state}`;
    badge.textContent = run.state;
    addCell(row, "").append(badge);
    const isTraining = run.state === "training";
    addCell(row, `${run.epochs}/${run.planned_epochs || "?"}`, true);
    addCell(row, run.steps.toLocaleString("en"), true);
    addCell(row, number(run.loss, 4), true);
    addCell(row, run.best == null ? "" : `${run.figure.replaceAll("_", " ")} ${number(run.best, 4)}`, true);
    addCell(row, run.samples_per_s ? Math.round(run.samples_per_s).toLocaleString("en") : "", true);
    addCell(row, isTraining ? duration(run.remaining_s) : "", true);
    addCell(row, run.plan);
    row.dataset.run = run.run;
    return row;
  }
  const places = new Map();
  function showFigure(figure, index) {
    let place = places.get(figure.title);
    if (!place) {
      const frame = document.createElement("figure"), caption = document.createElement("figcaption");
      place = document.createElement("div");
      caption.textContent = figure.title;
      place.className = "plot";
      place.dataset.figure = figure.title;
      place.setAttribute("role", "img");
      frame.append(caption, place);
      places.set(figure.title, place);
    }
    const curves = document.getElementById("curves"), frame = place.parentElement;
    if (curves.children[index] !== frame) curves.insertBefore(frame, curves.children[index] || null);
    place.setAttribute("aria-label", figure.label);
    hotloop.show(place, figure);
  }
  const events = new EventSource(`/events?token=${encodeURIComponent(token)}`);
  events.addEventListener("runs", event => {
    received = Date.now();
    const found = JSON.parse(event.data), training = found.runs.filter(run => run.state === "training").length;
    document.getElementById("runs").replaceChildren(...found.runs.map(tableRow));
    document.getElementById("limit").textContent = found.runs.length > found.runs_with_curves
      ? `Curves of the ${found.runs_with_curves} newest of ${found.runs.length} runs.` : "";
    const titles = new Set(found.figures.map(figure => figure.title));
    for (const [title, place] of places)
      if (!titles.has(title)) { place.parentElement.remove(); places.delete(title); }
    found.figures.forEach(showFigure);
    report(training ? `${training} training` : found.runs.length ? "no run is training" : "no run yet");
    document.title = (training ? "● " : "") + "hotloop";
  });
  events.addEventListener("heartbeat", () => { received = Date.now(); });
  setInterval(() => {
    if (events.readyState !== EventSource.OPEN && Date.now() - received > 3000)
      report("no connection: the page shows the last figures that arrived");
    else if (Date.now() - received > 15000) report("no heartbeat for 15 s");
  }, 1000);
})();
