"use strict";
(() => {
  // Figures: drawn one after the other, so that the page can be read meanwhile.
  const waiting = [];
  let drawing = false;

  async function drawNext() {
    const element = waiting.shift();
    if (!element) { drawing = false; document.documentElement.dataset.drawn = "all"; return; }
    if (element.isConnected) await draw(element);
    setTimeout(drawNext);
  }

  // Panels side by side stand below each other where the page is too narrow for two (pixels).
  const NARROWEST = 560;
  function stack(layout) {
    const panels = Object.keys(layout).filter((key) => /^xaxis\d*$/.test(key)).map((key) => {
      const x = layout[key], y = layout[(x.anchor ?? "y").replace("y", "yaxis")];
      const from = x.domain ?? [0, 1], top = y?.domain?.[1] ?? 1;
      const titles = (layout.annotations ?? []).filter((note) => note.yref === "paper" && note.y === top && note.x > from[0] && note.x < from[1]);
      return { x, y, from, top, titles };
    }).filter(({ x, y }) => y && x.anchor !== "free");
    if (panels.every(({ from }) => from[1] - from[0] >= 0.9)) return;
    panels.sort((a, b) => b.top - a.top || a.from[0] - b.from[0]);
    const share = 1 / panels.length, rows = new Set(panels.map(({ top }) => top)).size;
    layout.height *= panels.length / rows;
    panels.forEach(({ x, y, titles }, number) => {
      const end = 1 - number * share;
      for (const title of titles) Object.assign(title, { x: 0.5, y: end });
      x.domain = [0, 1];
      y.domain = [end - 0.68 * share, end];
    });
  }

  async function draw(element) {
    const source = element.querySelector("script[type='application/json']");
    if (!source) return;
    const figure = JSON.parse(source.textContent);
    source.remove();
    if (element.clientWidth < NARROWEST) stack(figure.layout);
    try {
      await Plotly.newPlot(element, figure.data, figure.layout, { responsive: true, displayModeBar: false });
    } catch (error) {
      element.textContent = "This figure can't be drawn here.";
      console.error(error);
    }
  }

  function drawAll(root) {
    const found = root.matches?.(".figure") ? [root] : [...root.querySelectorAll(".figure")];
    for (const element of found) {
      element.style.minHeight = `${element.dataset.height}px`;
      waiting.push(element);
    }
    if (waiting.length && !drawing) { drawing = true; delete document.documentElement.dataset.drawn; setTimeout(drawNext); }
    else if (!waiting.length && !drawing) document.documentElement.dataset.drawn = "all";
  }

  // Tables: a click, or Enter on a heading, sorts; once more turns the order round. What is missing stays at the end.
  const numberOf = (text) => { const value = Number(text.replaceAll(",", "")); return text === "" || Number.isNaN(value) ? null : value; };

  function compare(a, b) {
    const [x, y] = [numberOf(a), numberOf(b)];
    if (x !== null && y !== null) return x - y;
    return a.localeCompare(b, "en", { numeric: true });
  }

  function sort(table, column, heading) {
    const order = heading.getAttribute("aria-sort") === "ascending" ? "descending" : "ascending";
    for (const other of table.querySelectorAll("th")) other.removeAttribute("aria-sort");
    heading.setAttribute("aria-sort", order);
    const body = table.tBodies[0];
    const rows = [...body.rows].map((row) => [row.cells[column]?.textContent.trim() ?? "", row]);
    const known = rows.filter(([text]) => text !== "–" && text !== "");
    const missing = rows.filter(([text]) => text === "–" || text === "");
    known.sort(([a], [b]) => (order === "ascending" ? compare(a, b) : compare(b, a)));
    body.append(...[...known, ...missing].map(([, row]) => row));
  }

  function makeSortable(root) {
    for (const table of root.querySelectorAll(".wide table")) {
      const headings = [...(table.tHead?.rows[0]?.cells ?? [])];
      headings.forEach((heading, column) => {
        const button = document.createElement("button");
        button.type = "button";
        button.append(...heading.childNodes);
        button.addEventListener("click", () => sort(table, column, heading));
        heading.scope = "col";
        const cells = [...table.tBodies[0].rows].map((row) => row.cells[column]).filter(Boolean);
        for (const cell of cells) cell.dataset.column = button.textContent; // shown on a narrow page
        if (cells.some((cell) => !["", "–"].includes(cell.textContent) && numberOf(cell.textContent) === null))
          for (const cell of [heading, ...cells]) cell.classList.add("text");
        heading.append(button);
      });
    }
  }

  function prepare(root) { makeSortable(root); drawAll(root); }

  const narrow = window.matchMedia("(max-width: 69.99rem)");
  const foldContents = () => { const details = document.querySelector("nav details"); if (details) details.open = !narrow.matches; };
  narrow.addEventListener("change", foldContents);
  foldContents();
  prepare(document);
  window.addEventListener("beforeprint", () => { for (const element of document.querySelectorAll(".js-plotly-plot")) Plotly.Plots.resize(element); });

  // Live: what changed is fetched and swapped; everything else stays as it is.
  const live = document.getElementById("live");
  if (!live) return;
  const every = 1500;
  let known = {}, tag = null;

  async function look() {
    try {
      const answer = await fetch("/sections", { headers: tag ? { "If-None-Match": tag } : {} });
      if (answer.status === 200) {
        tag = answer.headers.get("ETag");
        await swap(await answer.json());
      }
      if (live.dataset.state !== "up") { live.dataset.state = "up"; live.textContent = "live: changes appear automatically"; }
    } catch {
      if (live.dataset.state !== "down") { live.dataset.state = "down"; live.textContent = "the server does not answer; restart muscale ui to continue"; }
      tag = null;
    }
    setTimeout(look, every);
  }

  async function markup(path) {
    const answer = await fetch(path);
    if (!answer.ok) throw new Error(`${path}: ${answer.status}`);
    const holder = document.createElement("template");
    holder.innerHTML = await answer.text();
    return holder.content.firstElementChild;
  }

  async function swap(state) {
    const main = document.getElementById("main");
    let before = null, changed = false;
    for (const [id, hash] of state.sections) {
      let element = document.getElementById(id);
      if (!element || known[id] !== hash) {
        if (element?.contains(document.activeElement) && document.activeElement.matches("button")) document.activeElement.blur();
        const fresh = await markup(`/sections/${encodeURIComponent(id)}`);
        for (const plot of element?.querySelectorAll(".js-plotly-plot") ?? []) Plotly.purge(plot);
        if (element) element.replaceWith(fresh); else if (before) before.after(fresh); else main.prepend(fresh);
        prepare(fresh);
        element = fresh;
        known[id] = hash;
        changed = true;
      }
      before = element;
    }
    const wanted = new Set(state.sections.map(([id]) => id));
    for (const element of [...main.children]) if (!wanted.has(element.id)) { element.remove(); delete known[element.id]; changed = true; }
    document.getElementById("written").textContent = state.written;
    if (changed) {
      const open = document.querySelector("nav details")?.open;
      document.querySelector("nav details").replaceWith(await markup("/contents"));
      document.querySelector("nav details").open = open;
    }
  }

  for (const [id, hash] of JSON.parse(live.dataset.known ?? "[]")) known[id] = hash;
  look();

  // Actions: asked twice, and only with the token.
  const dialog = document.getElementById("confirm"), refusal = document.getElementById("refusal");
  if (!dialog) return;
  let path = null;
  document.addEventListener("click", (event) => {
    const button = event.target.closest?.("button.act");
    if (!button) return;
    path = button.dataset.path;
    document.getElementById("confirm-title").textContent = button.dataset.title;
    document.getElementById("confirm-about").textContent = button.dataset.about;
    refusal.textContent = "";
    dialog.showModal();
  });
  document.getElementById("confirm-no").addEventListener("click", () => dialog.close());
  dialog.querySelector("form").addEventListener("submit", (event) => event.preventDefault());
  document.getElementById("confirm-yes").addEventListener("click", async () => {
    const answer = await fetch(path, {
      method: "POST",
      headers: { "Content-Type": "application/json", Authorization: `Bearer ${document.getElementById("token").value}` },
      body: JSON.stringify({ reason: document.getElementById("reason").value }),
    }).catch(() => null);
    if (answer?.ok) { dialog.close(); return; }
    refusal.textContent = answer ? (await answer.json()).detail : "the server does not answer";
  });
})();
