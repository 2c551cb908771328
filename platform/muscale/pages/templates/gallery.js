"use strict";
(() => {
  // Samples: some neighbouring checkpoints of a run are shown next to each other, on a narrow page one.
  const chooser = document.querySelector(".chooser");
  const wide = window.matchMedia("(min-width: 60rem)");
  const WINDOW = 3, ENDS = "the ends of all runs";
  if (chooser) {
    const items = [...document.querySelectorAll(".samples > li")];
    const runs = new Map();
    for (const item of items) {
      const run = item.querySelector("b").textContent, number = Number(item.dataset.checkpoint);
      if (!runs.has(run)) runs.set(run, new Set());
      runs.get(run).add(number);
    }
    for (const [run, numbers] of runs) runs.set(run, [...numbers].sort((a, b) => a - b));
    if (runs.size > 1) runs.set(ENDS, [...runs.values()].map((numbers) => numbers.at(-1)));

    const [previous, next] = chooser.querySelectorAll("button"), slider = chooser.querySelector("input");
    const buttons = [...runs.keys()].map((run) => {
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = run;
      button.addEventListener("click", () => choose(run));
      return button;
    });
    chooser.querySelector(".choices").append(...buttons);
    let numbers = [];

    function choose(run) {
      numbers = runs.get(run);
      for (const button of buttons) button.setAttribute("aria-pressed", button.textContent === run);
      slider.max = numbers.length - 1;
      slider.value = slider.max;
      show();
    }

    function show() {
      const size = wide.matches ? WINDOW : 1, at = Number(slider.value);
      const from = Math.max(0, Math.min(at, numbers.length - 1) - size + 1), shown = new Set(numbers.slice(from, from + size));
      for (const item of items) item.hidden = !shown.has(Number(item.dataset.checkpoint));
      slider.min = Math.min(size, numbers.length) - 1;
      chooser.querySelector("output").textContent = `${at + 1} of ${numbers.length}`;
      previous.disabled = at <= Number(slider.min);
      next.disabled = at >= Number(slider.max);
      const last = items.find((item) => Number(item.dataset.checkpoint) === numbers[at]);
      slider.setAttribute("aria-valuetext", last?.querySelector("summary").textContent ?? "");
    }

    const step = (by) => { slider.value = Number(slider.value) + by; show(); };
    previous.addEventListener("click", () => step(-1));
    next.addEventListener("click", () => step(1));
    slider.addEventListener("input", show);
    wide.addEventListener("change", show);
    for (const item of items) {
      item.firstElementChild.open = true;
      const summary = item.querySelector("summary");
      summary.tabIndex = -1;
      summary.addEventListener("click", (event) => event.preventDefault());
    }
    document.body.classList.add("choosing");
    chooser.hidden = false;
    choose([...runs.keys()].findLast((run) => run !== ENDS));
  }

  // Two checkpoints.
  const compared = document.getElementById("compared");
  if (!compared) return;
  const { columns, checkpoints, compared: first } = JSON.parse(document.getElementById("checkpoints").textContent);
  const selects = [...compared.querySelectorAll("select")];
  for (const [side, select] of selects.entries()) {
    const groups = new Map();
    for (const [number, { run, label }] of checkpoints.entries()) {
      if (!groups.has(run)) groups.set(run, Object.assign(document.createElement("optgroup"), { label: run }));
      groups.get(run).append(new Option(`${run}, ${label.tokens}`, number));
    }
    select.append(...groups.values());
    select.value = first[side];
    select.addEventListener("change", compare);
  }

  function compare() {
    const [a, b] = selects.map((select) => Number(select.value));
    const texts = [...document.querySelectorAll(".samples")].flatMap((list) => {
      const [left, right] = [a, b].map((number) => list.querySelector(`[data-checkpoint="${number}"] p`)?.textContent);
      if (left === undefined && right === undefined) return [];
      const marked = left !== undefined && right !== undefined ? marks(words(left), words(right)) : [[left ?? "–"], [right ?? "–"]];
      const prompt = make("h3", list.previousElementSibling.textContent);
      prompt.className = "prompt";
      return [prompt, ...marked.map((parts, side) => {
        const box = make("div");
        const { run, tokens, about } = checkpoints[[a, b][side]].label;
        box.append(make("p", `${"AB"[side]} · ${run}, ${tokens} · ${about}`), make("p"));
        box.firstChild.className = "soft";
        box.lastChild.append(...parts);
        return box;
      })];
    });
    compared.querySelector(".texts").replaceChildren(...texts);
    const rows = columns.flatMap((name, column) => {
      const [left, right] = [a, b].map((number) => checkpoints[number].scores[column]);
      if (!left || !right) return [];
      const difference = right[0] - left[0], error = left[1] !== null && right[1] !== null ? Math.hypot(left[1], right[1]) : null;
      const row = make("tr");
      const cells = [name, format(left[0]), format(right[0]), format(difference, true), format(error)];
      row.append(...cells.map((text, i) => Object.assign(make("td", text), { className: i ? "" : "text" })));
      [...row.cells].forEach((cell, i) => { cell.dataset.column = compared.querySelectorAll("th")[i].textContent; });
      if (error !== null && Math.abs(difference) > 2 * error) row.className = "clear";
      return [row];
    });
    compared.querySelector("tbody").replaceChildren(...rows);
    compared.querySelector(".wide").hidden = rows.length === 0;
  }

  const make = (tag, text = "") => Object.assign(document.createElement(tag), { textContent: text });
  const words = (text) => text.match(/\s+|[\p{L}\p{N}_]+|[^\s\p{L}\p{N}_]/gu) ?? [];
  function format(value, signed = false) {
    if (value === null) return "–";
    return `${signed && value > 0 ? "+" : ""}${Number(value.toPrecision(4))}`.replace("-", "−");
  }

  // Longest common subsequence of the words; what is in one text only is marked.
  function marks(left, right) {
    const length = Array.from({ length: left.length + 1 }, () => new Uint32Array(right.length + 1));
    for (let i = left.length - 1; i >= 0; i--)
      for (let j = right.length - 1; j >= 0; j--)
        length[i][j] = left[i] === right[j] ? length[i + 1][j + 1] + 1 : Math.max(length[i + 1][j], length[i][j + 1]);
    const parts = [[], []];
    for (let i = 0, j = 0; i < left.length || j < right.length; ) {
      if (i < left.length && j < right.length && left[i] === right[j]) { parts[0].push(left[i++]); parts[1].push(right[j++]); }
      else if (j === right.length || (i < left.length && length[i + 1][j] >= length[i][j + 1])) parts[0].push(make("mark", left[i++]));
      else parts[1].push(make("mark", right[j++]));
    }
    return parts;
  }

  compared.hidden = false;
  compare();
})();
