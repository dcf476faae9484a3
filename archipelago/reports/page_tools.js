/* Tables that can be sorted, filtered and folded, and figures that can be taken along: no network, no library. */
(function () {
  "use strict";
  const number = (text) => { const found = text.replace(/,/g, "").match(/^<?([+-]?[\d.]+(?:e[+-]?\d+)?)/); return found ? parseFloat(found[1]) : NaN; };

  function sortable(table) {
    const body = table.tBodies[0];
    [...table.tHead.rows[0].cells].forEach((head, column) => {
      const sort = () => {
        const small = column === 0 || head.textContent === "rank" || head.textContent === "p"; // the best of them come first
        const up = head.hasAttribute("aria-sort") ? head.getAttribute("aria-sort") === "descending" : small;
        const key = (row) => row.cells[column].textContent.trim();
        const rows = [...body.rows].sort((a, b) => {
          const [x, y] = [key(a), key(b)], [n, m] = [number(x), number(y)];
          const guess = (row) => row.classList.contains("guess"); // no method: below all of them, whatever the order
          if (guess(a) !== guess(b)) { return guess(a) ? 1 : -1; }
          if ((x === "") !== (y === "")) { return x === "" ? 1 : -1; } // what does not exist comes last
          const order = Number.isNaN(n) || Number.isNaN(m) ? x.localeCompare(y) : n - m;
          return up ? order : -order;
        });
        for (const other of table.tHead.rows[0].cells) { other.removeAttribute("aria-sort"); }
        head.setAttribute("aria-sort", up ? "ascending" : "descending");
        body.append(...rows);
      };
      head.tabIndex = 0; head.title = "Sort by this column";
      head.addEventListener("click", sort);
      head.addEventListener("keydown", (event) => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); sort(); } });
    });
  }

  function tools(card) {
    const table = card.querySelector("table"), bar = card.querySelector(".tools");
    if (!table || !bar) { return; }
    sortable(table);
    const field = bar.querySelector("input");
    field.addEventListener("input", () => {
      const words = field.value.toLowerCase().split(/\s+/).filter(Boolean);
      for (const row of table.tBodies[0].rows) {
        const text = row.textContent.toLowerCase();
        row.hidden = !words.every((word) => text.includes(word));
      }
    });
    for (const button of bar.querySelectorAll("button")) {
      const kind = button.dataset.fold;
      button.addEventListener("click", () => {
        const shown = card.classList.toggle(kind);
        button.textContent = `${shown ? "Hide" : "Show"} ${kind}`; button.setAttribute("aria-expanded", String(shown));
      });
    }
    bar.hidden = false;
  }

  function save(name, address) {
    const link = document.createElement("a");
    link.href = address; link.download = name; link.click();
  }

  const quoted = (value) => (value === null || value === undefined ? "" : /[",\n]/.test(String(value)) ? `"${String(value).replace(/"/g, '""')}"` : String(value));

  /* The numbers of any figure as rows of (path, position, value); series of equal length get a column each. */
  function csv(data) {
    if (Array.isArray(data.series) && data.series.length && Array.isArray(data.series[0].y)) {
      const rows = [["series", "x", "y", "low", "high"]];
      for (const each of data.series) {
        each.y.forEach((y, at) => rows.push([each.name, (each.x || data.at)[at], y, each.low ? each.low[at] : "", each.high ? each.high[at] : ""]));
      }
      return rows;
    }
    if (Array.isArray(data.names) && Array.isArray(data.values)) {
      return [["name", "value", "std", "published"], ...data.names.map((name, at) => [name, data.values[at], data.errors[at], data.published[at]])];
    }
    if (Array.isArray(data.z)) { return [["", ...data.x], ...data.z.map((row, at) => [data.y[at], ...row])]; }
    const rows = [["what", "at", "value"]];
    const walk = (value, path, at) => {
      if (Array.isArray(value)) { value.forEach((item, place) => walk(item, path, at === "" ? place : `${at}.${place}`)); }
      else if (value && typeof value === "object") { for (const key of Object.keys(value)) { if (key !== "image") { walk(value[key], path ? `${path}.${key}` : key, at); } } }
      else { rows.push([path, at, value]); }
    };
    walk(data, "", "");
    return rows;
  }

  /* Strips of images under each other, with their names, as one canvas. */
  const LINE = 18;
  function sheet(place) {
    const strips = [...place.querySelectorAll(".strip")].map((strip) => [strip.querySelector("b").textContent, strip.querySelector("img")]);
    const canvas = document.createElement("canvas"), pen = canvas.getContext("2d");
    canvas.width = Math.max(...strips.map(([, image]) => image.naturalWidth), 160);
    canvas.height = strips.reduce((sum, [, image]) => sum + LINE + image.naturalHeight, 0);
    pen.fillStyle = "#fff"; pen.fillRect(0, 0, canvas.width, canvas.height);
    pen.fillStyle = "#000"; pen.font = "12px sans-serif";
    let top = 0;
    for (const [name, image] of strips) {
      pen.fillText(name, 2, top + 13); pen.drawImage(image, 0, top + LINE);
      top += LINE + image.naturalHeight;
    }
    return canvas;
  }

  /* The same as a drawing: the images as they are, names as text. */
  function drawing(place) {
    const root = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    const add = (name, attributes, text) => {
      const part = document.createElementNS(root.namespaceURI, name);
      for (const key of Object.keys(attributes)) { part.setAttribute(key, attributes[key]); }
      part.textContent = text || ""; root.append(part);
    };
    let top = 0, width = 160;
    for (const strip of place.querySelectorAll(".strip")) {
      const image = strip.querySelector("img"), [w, h] = [image.naturalWidth, image.naturalHeight];
      add("text", { x: 2, y: top + 13, "font-size": 12, "font-family": "sans-serif" }, strip.querySelector("b").textContent);
      add("image", { x: 0, y: top + LINE, width: w, height: h, href: image.src, style: "image-rendering: pixelated" });
      top += LINE + h; width = Math.max(width, w);
    }
    root.setAttribute("viewBox", `0 0 ${width} ${top}`); root.setAttribute("width", width); root.setAttribute("height", top);
    return `data:image/svg+xml;charset=utf-8,${encodeURIComponent(new XMLSerializer().serializeToString(root))}`;
  }

  /* Their pixels: a line each, red, green and blue from 0 to 255. */
  function pixels(place) {
    const rows = [["name", "row", "column", "red", "green", "blue"]];
    for (const strip of place.querySelectorAll(".strip")) {
      const image = strip.querySelector("img"), canvas = document.createElement("canvas"), name = strip.querySelector("b").textContent;
      const [w, h] = [canvas.width, canvas.height] = [image.naturalWidth, image.naturalHeight];
      const pen = canvas.getContext("2d");
      pen.drawImage(image, 0, 0);
      const { data } = pen.getImageData(0, 0, w, h);
      for (let at = 0; at < w * h; at += 1) { rows.push([name, Math.floor(at / w), at % w, ...data.slice(4 * at, 4 * at + 3)]); }
    }
    return rows;
  }

  function takeable(card) {
    const place = card.querySelector(".plot"), bar = document.createElement("div");
    bar.className = "take";
    const figure = () => (window.report || { figures: [] }).figures.find((each) => each.name === place.dataset.drawn);
    for (const format of ["PNG", "SVG", "CSV"]) {
      const button = document.createElement("button");
      button.type = "button"; button.textContent = format; button.setAttribute("aria-label", `This figure as ${format}`);
      button.addEventListener("click", async () => {
        const shown = figure();
        if (!shown) { return; }
        const pictures = shown.kind === "images";
        if (format === "CSV") {
          const text = (pictures ? pixels(place) : csv(shown.data)).map((row) => row.map(quoted).join(",")).join("\n") + "\n";
          save(`${shown.name}.csv`, URL.createObjectURL(new Blob([text], { type: "text/csv;charset=utf-8" })));
        } else if (pictures) {
          save(`${shown.name}.${format.toLowerCase()}`, format === "PNG" ? sheet(place).toDataURL("image/png") : drawing(place));
        } else {
          const size = { width: place.clientWidth, height: place.clientHeight, scale: format === "PNG" ? 2 : 1 };
          save(`${shown.name}.${format.toLowerCase()}`, await Plotly.toImage(place, { format: format.toLowerCase(), ...size }));
        }
      });
      bar.append(button);
    }
    card.append(bar);
  }

  /* A number leads to its runs, which are folded until then. */
  function unfold() {
    const aim = location.hash.length > 1 && document.getElementById(location.hash.slice(1));
    if (aim && aim.tagName === "DETAILS") { aim.open = true; aim.scrollIntoView(); }
  }
  window.addEventListener("hashchange", unfold);
  unfold();

  window.reportTools = { csv };
  document.querySelectorAll("#tables .card").forEach(tools);
  document.querySelectorAll("[data-family]").forEach(takeable);
})();
