"use strict";
(() => {
  const data = JSON.parse(document.getElementById("page-data").textContent);
  document.documentElement.classList.add("script");
  const SVG = "http://www.w3.org/2000/svg";

  function make(name, className, text) {
    const element = document.createElement(name);
    if (className) element.className = className;
    if (text !== undefined) element.textContent = text;
    return element;
  }

  function swatch(color) {
    const drawn = document.createElementNS(SVG, "svg");
    drawn.setAttribute("viewBox", "0 0 20 10");
    drawn.setAttribute("class", "swatch");
    drawn.setAttribute("aria-hidden", "true");
    const line = document.createElementNS(SVG, "line");
    const style = { x1: 1, x2: 19, y1: 5, y2: 5, class: `curve ${styleOf(color)}` };
    for (const [key, value] of Object.entries(style)) line.setAttribute(key, value);
    drawn.append(line);
    return drawn;
  }

  // As plots.py has it.
  const styleOf = (color) => `s${color % 8} d${Math.floor(color / 8) % 3}`;

  function number(value) {
    if (value === null) return "–";
    const size = Math.abs(value);
    if (size >= 1000 && size < 1e15) {
      return Math.round(value).toLocaleString("en-US");
    }
    if (size === 0 || (size >= 1e-3 && size < 1000)) return String(Number(value.toPrecision(4)));
    return value.toExponential(2).replace(/\.?0+e/, "e").replace("e+", "e");
  }

  // A text, or [its beginning, how many characters of it are left out].
  const textOf = (text) => (Array.isArray(text) ? text[0] : text);

  // ---------------------------------------------------------------- curves

  // Writes the values of a chart alike, to about a thousandth of its axis.
  function writer(chart) {
    const [low, high] = chart.y;
    const largest = Math.max(Math.abs(low), Math.abs(high));
    if (chart.log || largest >= 1e15) {
      return (value) =>
        Math.abs(value) >= 1e-3 && Math.abs(value) < 1e3 ? value.toPrecision(4) : number(value);
    }
    if (largest < 1e-2) {
      return (value) => (value === 0 ? "0" : value.toExponential(2).replace("e+", "e"));
    }
    const digits = Math.min(6, Math.max(0, 3 - Math.floor(Math.log10(high - low))));
    const how = { minimumFractionDigits: digits, maximumFractionDigits: digits };
    return (value) => value.toLocaleString("en-US", how);
  }

  // Index of the step nearest to `step` in an ascending list.
  function nearest(steps, step) {
    let low = 0;
    let high = steps.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (steps[middle] < step) low = middle;
      else high = middle;
    }
    return step - steps[low] <= steps[high] - step ? low : high;
  }

  function follow(figure) {
    const chart = data.charts[Number(figure.dataset.chart)];
    const svg = figure.querySelector("svg:not(.swatch)");
    const cursor = figure.querySelector(".cursor");
    const readout = figure.querySelector(".readout");
    const [firstStep, lastStep, left, right] = chart.x;
    const [low, high, bottom, top] = chart.y;
    const all = [...new Set(chart.series.flatMap((line) => line.steps))].sort((a, b) => a - b);
    const written = writer(chart);
    let shown = null;

    const placeOf = (step) => left + ((right - left) * (step - firstStep)) / (lastStep - firstStep);
    const heightOf = (value) => {
      const scale = chart.log ? Math.log : (x) => x;
      const share = (scale(value) - scale(low)) / (scale(high) - scale(low));
      return bottom - (bottom - top) * share;
    };

    function add(name, attributes) {
      const element = document.createElementNS(SVG, name);
      for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
      cursor.append(element);
    }

    // "step 20: training 2.31 · ..."; several runs are told by their colours, and to a reader.
    function tell(step, values) {
      readout.replaceChildren(`step ${number(step)}: `);
      if (!values.length) readout.append("no value");
      values.forEach(([line, value, at], index) => {
        if (index) readout.append(" · ");
        const item = make("span", "item");
        if (data.runs > 1) item.append(swatch(line.color));
        if (chart.series.length > 1) {
          item.append(make("span", data.runs > 1 ? "unseen" : "", `${line.name} `));
        }
        item.append(written(value));
        if (at !== step) item.append(` (step ${number(at)})`);
        readout.append(item);
      });
    }

    function show(step) {
      shown = step;
      cursor.replaceChildren();
      const x = placeOf(step);
      add("line", { x1: x, x2: x, y1: top, y2: bottom });
      const values = [];
      for (const line of chart.series) {
        const index = nearest(line.steps, step);
        const value = line.values[index];
        // A curve with a value near by is read there, as validations are rarer than rows.
        const away = Math.abs(line.steps[index] - step);
        if (value === null || away > (lastStep - firstStep) / 20) continue;
        add("circle", {
          cx: placeOf(line.steps[index]), cy: heightOf(value), r: 3.2,
          class: `dot ${styleOf(line.color)}`,
        });
        values.push([line, value, line.steps[index]]);
      }
      tell(step, values);
    }

    function hide() {
      shown = null;
      cursor.replaceChildren();
      readout.textContent = "";
    }

    svg.addEventListener("pointermove", (event) => {
      const box = svg.getBoundingClientRect();
      const x = ((event.clientX - box.left) / box.width) * svg.viewBox.baseVal.width;
      const step = firstStep + ((lastStep - firstStep) * (x - left)) / (right - left);
      show(all[nearest(all, step)]);
    });
    svg.addEventListener("pointerleave", hide);
    figure.addEventListener("blur", hide);
    figure.addEventListener("keydown", (event) => {
      const last = all.length - 1;
      const at = shown === null ? last : nearest(all, shown);
      const moved = {
        ArrowLeft: Math.max(0, at - 1), ArrowRight: Math.min(last, at + 1), Home: 0, End: last,
      }[event.key];
      if (moved === undefined) {
        if (event.key === "Escape") hide();
        return;
      }
      event.preventDefault();
      show(all[shown === null && event.key.startsWith("Arrow") ? at : moved]);
    });
    return {
      readout,
      hide,
      // With as much as it will ever have to hold.
      fill: () => tell(lastStep, chart.series.flatMap((line, index) => {
        const known = line.values.filter((value) => value !== null);
        if (!known.length) return [];
        const longest = known.reduce((a, b) => (written(a).length < written(b).length ? b : a));
        return [[line, longest, index ? lastStep - 1 : lastStep]];
      })),
    };
  }

  const charts = [...document.querySelectorAll("figure.panel")].map(follow);

  // Nothing below a chart moves when its values are read.
  function reserve() {
    for (const { readout, fill } of charts) {
      readout.style.minHeight = "";
      fill();
    }
    const heights = charts.map(({ readout }) => readout.offsetHeight);
    charts.forEach(({ readout, hide }, index) => {
      hide();
      readout.style.minHeight = `${heights[index]}px`;
    });
  }

  let width = window.innerWidth;
  window.addEventListener("resize", () => {
    if (window.innerWidth !== width) reserve();
    width = window.innerWidth;
  });
  reserve();

  // ---------------------------------------------------------------- summaries

  if (!data.evaluations.length) return;
  const PAGE = 10;
  const TEXTS = 4; // id, document, references, prediction; numbers follow
  const get = (id) => document.getElementById(id);
  const [choice, sort, order, query] = ["evaluation", "sort", "order", "query"].map(get);
  const [examples, position, previous, next] =
    ["examples", "position", "previous", "next"].map(get);
  let evaluation = data.evaluations[0];
  let searched = null; // lower-case texts of the evaluation's rows, made when first needed
  let found = []; // numbers of rows, in the order shown
  let page = 0;

  const title = (field) => data.titles[field] || field.replaceAll("_", " ");
  const isRouge = (field) => field in data.titles;
  const shownNumber = (field, value) =>
    value === null ? "–" : isRouge(field) ? (100 * value).toFixed(1) : number(value);

  function option(value, text) {
    const element = make("option", "", text);
    element.value = value;
    return element;
  }

  function fillOrder() {
    const kept = order.value;
    const field = evaluation.fields[Number(sort.value)];
    const words = sort.value === ""
      ? ["first to last", "last to first"]
      : isRouge(field) ? ["worst first", "best first"] : ["lowest first", "highest first"];
    order.replaceChildren(option("up", words[0]), option("down", words[1]));
    order.value = kept || "up";
  }

  function choose() {
    evaluation = data.evaluations[Number(choice.value)];
    searched = null;
    sort.replaceChildren(
      ...evaluation.fields.map((field, index) => option(String(index), title(field))),
      option("", "place in the split"),
    );
    const metric = evaluation.fields.indexOf(evaluation.metric);
    sort.value = metric < 0 ? "" : String(metric);
    fillOrder();
    get("cut").textContent = evaluation.cut;
    get("paper").textContent =
      `On paper stand the examples that the page showed. All ${evaluation.rows.length.toLocaleString("en-US")} ` +
      `are in the page itself, in a browser, and in ${evaluation.file} of the run's folder` +
      (data.runs > 1 ? ` (${evaluation.run}).` : ".");
    refresh();
  }

  // What is searched for, in lower case: each word, and as one what stands in quotation marks.
  function wantedWords() {
    const found = query.value.toLowerCase().matchAll(/"([^"]+)"?|\S+/g);
    return [...found].map(([all, quoted]) => (quoted === undefined ? all : quoted.trim()))
      .filter((word) => word !== "");
  }

  function refresh() {
    const rows = evaluation.rows;
    const wanted = wantedWords();
    if (wanted.length && searched === null) {
      searched = rows.map((row) =>
        [row[0], row[1] || "", ...row[2], row[3]].map(textOf).join("\n").toLowerCase());
    }
    found = [...rows.keys()].filter((index) =>
      wanted.every((word) => searched[index].includes(word)));
    const sign = order.value === "down" ? -1 : 1;
    if (sort.value === "") {
      if (sign < 0) found.reverse();
    } else {
      const column = TEXTS + Number(sort.value);
      found.sort((a, b) => {
        const [left, right] = [rows[a][column], rows[b][column]];
        if (left === null || right === null) return (left === null) - (right === null) || a - b;
        return sign * (left - right) || a - b;
      });
    }
    page = 0;
    draw();
  }

  // The text with what was searched for marked.
  function fillText(element, text) {
    // Of two that begin alike the longer one is marked.
    const words = wantedWords().sort((a, b) => b.length - a.length)
      .map((word) => word.replace(/[.*+?^${}()|[\]\\]/g, "\\$&"));
    const lower = text.toLowerCase();
    let from = 0;
    // Lower case may have another length; then nothing is marked.
    if (words.length && lower.length === text.length) {
      for (const { 0: word, index } of lower.matchAll(new RegExp(words.join("|"), "g"))) {
        const end = index + word.length;
        element.append(text.slice(from, index), make("mark", "", text.slice(index, end)));
        from = end;
      }
    }
    element.append(text.slice(from));
  }

  function column(heading, texts) {
    const element = make("div");
    const title = make("h3", "", heading);
    element.append(title);
    for (const given of texts) {
      const text = textOf(given);
      const block = make("div", text.trim() ? "text" : "text empty");
      block.dir = "auto";
      if (text.trim()) fillText(block, text);
      else block.textContent = "(empty)";
      if (given !== text) {
        const all = text.length + given[1];
        const what = `cut: ${text.length.toLocaleString("en-US")} of ${all.toLocaleString("en-US")}`;
        title.append(make("span", "cut", `${what} characters`));
        block.append(make("span", "cut", "…"));
      }
      element.append(block);
    }
    return element;
  }

  // Each evaluation has its own limit, but none has less of a reference.
  const beginnings = (texts) => JSON.stringify(texts.map((text) => textOf(text).slice(0, 2000)));

  // Of the same example by the other runs: [heading, text].
  function summariesOfOthers(id, references) {
    const found = [];
    for (const other of data.evaluations) {
      if (other.run === evaluation.run || other.split !== evaluation.split) continue;
      if (!other.byId) other.byId = new Map(other.rows.map((row) => [row[0], row]));
      const row = other.byId.get(id);
      // An id may be of other data.
      if (!row || beginnings(row[2]) !== beginnings(references)) continue;
      const field = evaluation.fields[Number(sort.value)];
      const column = sort.value === "" ? -1 : other.fields.indexOf(field);
      const score = column < 0 ? "" : `, ${title(field)} ${shownNumber(field, row[TEXTS + column])}`;
      found.push([`Summary of ${other.run}${score}`, row[3]]);
    }
    return found;
  }

  function drawRow(index) {
    const [id, documentText, references, prediction, ...numbers] = evaluation.rows[index];
    const element = make("article", "example");
    const header = make("header");
    const name = make("b");
    fillText(name, id);
    header.append(name);
    evaluation.fields.forEach((field, position) => {
      const isSorted = String(position) === sort.value;
      if (!isRouge(field) && !isSorted) return;
      const text = `${title(field)} ${shownNumber(field, numbers[position])}`;
      header.append(make("span", isSorted ? "sorted" : "", text));
    });
    const texts = make("div", documentText === null ? "texts two" : "texts");
    if (documentText !== null) texts.append(column("Document", [documentText]));
    const others = summariesOfOthers(id, references);
    const own = others.length ? `Summary of ${evaluation.run}` : "Summary";
    const summaries = column(own, [prediction]);
    for (const [heading, text] of others) summaries.append(...column(heading, [text]).children);
    texts.append(column(references.length > 1 ? "References" : "Reference", references), summaries);
    element.append(header, texts);
    // Long texts scroll by themselves, and the keyboard must reach them.
    element.querySelectorAll(".text").forEach((block) => { block.tabIndex = -1; });
    return element;
  }

  function draw() {
    const first = page * PAGE;
    const last = Math.min(found.length, first + PAGE);
    examples.replaceChildren(...found.slice(first, last).map(drawRow));
    examples.querySelectorAll(".text").forEach((block) => {
      if (block.scrollHeight > block.clientHeight) block.tabIndex = 0;
      else block.removeAttribute("tabindex");
    });
    const of = found.length.toLocaleString("en-US");
    position.textContent = found.length
      ? `${(first + 1).toLocaleString("en-US")} to ${last.toLocaleString("en-US")} of ${of}`
      : `0 of ${evaluation.rows.length.toLocaleString("en-US")} in ${evaluation.split}`;
    previous.disabled = page === 0;
    next.disabled = last >= found.length;
  }

  function turn(by) {
    page += by;
    draw();
    get("summaries").scrollIntoView();
  }

  let timer = 0;
  choice.addEventListener("change", choose);
  sort.addEventListener("change", () => { fillOrder(); refresh(); });
  order.addEventListener("change", refresh);
  query.addEventListener("input", () => {
    clearTimeout(timer);
    timer = setTimeout(refresh, 120);
  });
  previous.addEventListener("click", () => turn(-1));
  next.addEventListener("click", () => turn(1));
  choose();
})();
