/* Draws the figures of a report with plotly, which the page carries compressed; nothing is ever fetched. */
(function () {
  "use strict";
  const { palette: PALETTE, none: NONE, scale: SCALE, faint: FAINT } = JSON.parse(document.getElementById("colors").textContent); // palette.py
  const DASHES = ["solid", "dash", "dot", "dashdot", "longdash", "longdashdot"];
  const SYMBOLS = ["circle", "square", "diamond", "cross", "triangle-up", "x", "star", "pentagon", "triangle-down", "hexagon"];
  const color = (at) => (at < 0 ? NONE : PALETTE[at % PALETTE.length]);
  const dash = (series) => DASHES[((series.dash || 0) + Math.floor(Math.max(series.color, 0) / PALETTE.length)) % DASHES.length];
  const faint = (at, alpha) => {
    const hex = color(at);
    return `rgba(${parseInt(hex.slice(1, 3), 16)},${parseInt(hex.slice(3, 5), 16)},${parseInt(hex.slice(5, 7), 16)},${alpha})`;
  };
  const narrow = () => window.innerWidth < 760;
  const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  async function unpacked(id) {
    const packed = document.getElementById(id).textContent.trim();
    const bytes = Uint8Array.from(atob(packed), (letter) => letter.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    return new Response(stream).text();
  }

  function axis(title, more) {
    return Object.assign({
      title: { text: title, standoff: 8, font: { size: 12 } }, gridcolor: style("--line"), zeroline: false,
      linecolor: style("--line"), tickfont: { size: 11 }, automargin: true,
    }, more || {});
  }

  /* Names of bars from top to bottom; on a phone in two lines, so that the bars keep their width. */
  function names(texts) {
    const shown = narrow() ? texts.map((text) => text.replace(/, K = /, "<br>K = ").replace(/ \(/, "<br>(")) : texts;
    return axis("", { autorange: "reversed", tickmode: "array", tickvals: texts, ticktext: shown });
  }

  function layout(more) {
    return Object.assign({
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", height: narrow() ? 320 : 360,
      font: { family: "system-ui, sans-serif", color: style("--ink"), size: 12 },
      margin: { l: 48, r: 12, t: 12, b: 40 }, hoverlabel: { font: { size: 12 } },
      colorway: PALETTE,
    }, more || {}, { showlegend: false });
  }

  const KINDS = {
    lines(data) {
      const traces = [], shapes = [];
      for (const series of data.series) {
        const group = series.name;
        if (series.low) {
          traces.push({
            x: series.x.concat(series.x.slice().reverse()), y: series.high.concat(series.low.slice().reverse()), type: "scatter",
            mode: "none", fill: "toself", fillcolor: faint(series.color, 0.16), hoverinfo: "skip", legendgroup: group, showlegend: false,
          });
        }
        traces.push({
          x: series.x, y: series.y, name: group, legendgroup: group, type: "scatter",
          mode: series.x.length < 30 ? "lines+markers" : "lines", marker: { size: 4.5 },
          line: { color: color(series.color), width: 2.2, dash: dash(series) }, hovertemplate: `%{y:.4~g}<extra>${group}</extra>`,
        });
        for (const at of series.marks) {
          shapes.push({ type: "line", x0: at, x1: at, yref: "paper", y0: 0, y1: 1, line: { color: faint(series.color, 0.7), width: 1.3, dash: "dot" } });
        }
      }
      const rounds = data.x === "round" ? data.series.flatMap((series) => series.x) : [];
      const few = rounds.length && Math.max(...rounds) - Math.min(...rounds) < 9;  // there is no round one and a half
      return [traces, layout({ hovermode: "x unified", xaxis: axis(data.x, few ? { dtick: 1 } : {}), yaxis: axis(data.y), shapes })];
    },
    stack(data) {
      const named = typeof data.at[0] === "string", many = data.at.length > 25;
      const sideways = data.bars && named && !many && Math.max(...data.at.map((name) => name.length)) > 8;
      const traces = data.series.map((series) => {
        const shared = { name: series.name, hovertemplate: sideways ? `%{x:.4~g}<extra>${series.name}</extra>` : `%{y:.4~g}<extra>${series.name}</extra>` };
        if (!data.bars) {
          return Object.assign(shared, { x: data.at, y: series.y, type: "scatter", mode: "lines", stackgroup: "one",
            line: { width: 0.8, color: color(series.color), shape: "hv" }, fillcolor: faint(series.color, 0.78) });
        }
        return Object.assign(shared, { type: "bar", orientation: sideways ? "h" : "v", x: sideways ? series.y : data.at, y: sideways ? data.at : series.y,
          marker: { color: faint(series.color, series.color >= PALETTE.length ? FAINT : 0.9) } });
      });
      const across = axis(data.x, named && many ? { showticklabels: false } : {}), up = axis(data.y);
      const size = sideways ? 70 + (narrow() ? 34 : 28) * data.at.length : (narrow() ? 330 : 360);
      return [traces, layout({ barmode: "stack", bargap: many ? 0 : 0.25, hovermode: data.bars && !many ? "closest" : "x unified", height: Math.max(size, 200),
        xaxis: sideways ? axis(data.y) : across, yaxis: sideways ? names(data.at) : up })];
    },
    bars(data) {
      const traces = [{
        type: "bar", orientation: "h", y: data.names, x: data.values, marker: { color: data.colors.map((at) => faint(at, 0.85)) },
        error_x: { type: "data", array: data.errors, thickness: 1.4, width: 5, color: style("--ink") }, name: "this run",
        hovertemplate: "%{y}: %{x:.4~g}<extra></extra>",
      }];
      if (data.published.some((value) => value !== null)) {
        traces.push({ type: "scatter", mode: "markers", y: data.names, x: data.published, name: "published", marker: { symbol: "diamond", size: 10,
          color: style("--card"), line: { width: 2, color: style("--ink") } }, hovertemplate: "published: %{x:.4~g}<extra></extra>" });
      }
      return [traces, layout({ xaxis: axis(data.y, { range: data.range }), yaxis: names(data.names), bargap: 0.32,
        height: Math.max(180, 70 + 36 * data.names.length) })];
    },
    spread(data) {
      const traces = data.series.map((series) => ({
        type: "violin", orientation: "h", x: series.values, name: series.name, line: { color: color(series.color), width: 1.5 }, spanmode: "hard",
        fillcolor: faint(series.color, 0.22), box: { visible: true, width: 0.25 }, meanline: { visible: true }, points: series.values.length <= 80 ? "all" : false,
        pointpos: 0, jitter: 0.5, marker: { size: 4, opacity: 0.6 }, hoveron: "violins+points", scalemode: "width",
      }));
      return [traces, layout({ xaxis: axis(data.y), yaxis: names(data.series.map((series) => series.name)), violingap: 0.15,
        height: Math.max(240, 80 + 52 * data.series.length) })];
    },
    flow(data) {
      const columns = data.columns.length, inColumn = {}, x = [], y = [], total = {};
      data.nodes.forEach((node) => { total[node.column] = (total[node.column] || 0) + node.size; });
      data.nodes.forEach((node) => {
        const before = inColumn[node.column] || 0;
        x.push(0.001 + 0.998 * (columns > 1 ? node.column / (columns - 1) : 0));
        y.push(Math.min(0.999, Math.max(0.001, (before + node.size / 2) / total[node.column])));
        inColumn[node.column] = before + node.size;
      });
      const last = columns - 1;
      const traces = [{
        type: "sankey", arrangement: "fixed", orientation: "h",
        node: { label: data.nodes.map((node) => (node.column === 0 || node.column === last ? node.name : "")), x, y, pad: 12, thickness: 12,
          customdata: data.nodes.map((node) => `${data.columns[node.column]}: ${node.name}`), color: data.nodes.map((node) => color(node.color)), line: { width: 0 },
          hovertemplate: "%{customdata}, %{value} clients<extra></extra>" },
        link: { source: data.links.map((link) => link.source), target: data.links.map((link) => link.target), value: data.links.map((link) => link.count),
          color: data.links.map((link) => faint(data.nodes[link.source].color, 0.34)),
          customdata: data.links.map((link) => `${data.nodes[link.source].name} → ${data.nodes[link.target].name}`),
          hovertemplate: "%{customdata}, %{value} clients<extra></extra>" },
      }];
      const words = data.columns.map((text, at) => ({ text: narrow() && columns > 4 ? text.replace("round ", "") : text, x: columns > 1 ? at / last : 0, y: 1.09, xref: "paper",
        yref: "paper", showarrow: false, xanchor: at === 0 ? "left" : at === last ? "right" : "center", font: { size: 11, color: style("--soft") } }));
      return [traces, layout({ annotations: words, margin: { l: 8, r: 8, t: 34, b: 12 }, height: narrow() ? 330 : 380 })];
    },
    scatter(data) {
      const count = data.panels.length, across = Math.min(count, 2), down = Math.ceil(count / across), traces = [], words = [];
      const more = { height: 40 + down * (narrow() ? 190 : 250), margin: { l: 10, r: 10, t: 26, b: 10 } }, seen = new Set();
      data.panels.forEach((panel, at) => {
        const column = at % across, row = Math.floor(at / across), name = at === 0 ? "" : String(at + 1);
        const left = column / across + 0.015, right = (column + 1) / across - 0.015, top = 1 - row / down - 0.04, bottom = 1 - (row + 1) / down + 0.03;
        const plain = { showticklabels: false, gridcolor: style("--line"), zeroline: false, mirror: true, linecolor: style("--line") };
        more[`xaxis${name}`] = Object.assign({}, plain, { domain: [left, right], anchor: `y${name}` });
        more[`yaxis${name}`] = Object.assign({}, plain, { domain: [bottom, top], anchor: `x${name}` });
        words.push({ text: panel.title, x: (left + right) / 2, y: top, xref: "paper", yref: "paper", yanchor: "bottom", showarrow: false, font: { size: 12, color: style("--soft") } });
        for (const group of [...new Set(panel.color)].sort((a, b) => a - b)) {
          const mine = panel.x.map((_, i) => i).filter((i) => panel.color[i] === group);
          const label = group < 0 ? "no cluster" : `cluster ${group}`;
          traces.push({
            type: "scatter", mode: "markers", xaxis: `x${name}`, yaxis: `y${name}`, x: mine.map((i) => panel.x[i]), y: mine.map((i) => panel.y[i]),
            name: label, legendgroup: label, showlegend: !seen.has(label), marker: { color: color(group), size: 9, opacity: 0.85, line: { width: 0.8, color: style("--card") },
              symbol: mine.map((i) => SYMBOLS[panel.symbol[i] % SYMBOLS.length]) },
            text: mine.map((i) => `client ${panel.client[i]}, ${label}` + (data.ground_truth ? `, ground-truth group ${panel.symbol[i]}` : "")), hovertemplate: "%{text}<extra></extra>",
          });
          seen.add(label);
        }
      });
      return [traces, layout(Object.assign(more, { annotations: words }))];
    },
    heatmap(data) {
      const rows = data.y.length, columns = data.x.length, square = rows === columns && !data.names;
      const lowest = Math.min(...data.z.flat()), traces = [{
        type: "heatmap", z: data.z, x: data.x, y: data.y, xgap: columns <= 12 ? 2 : 0, ygap: rows <= 12 && !data.cuts ? 2 : 0,
        hovertemplate: "%{y}<br>%{x}<br>%{z}<extra></extra>",
      }];
      if (data.names) {
        const top = data.names.length - 1;
        traces[0].z = data.z.map((row) => row.map((value) => (value < 0 ? null : value % PALETTE.length)));
        traces[0].customdata = data.z.map((row) => row.map((value, at) => `${data.x[at].startsWith("ground-truth") ? "group" : "model"} ${value}`));
        traces[0].hovertemplate = "%{y}, %{x}: %{customdata}<extra></extra>";
        traces[0].zmin = -0.5; traces[0].zmax = PALETTE.length - 0.5; traces[0].showscale = false;
        traces[0].colorscale = PALETTE.flatMap((hex, at) => [[at / PALETTE.length, hex], [(at + 1) / PALETTE.length, hex]]);
        if (top < 0) { traces[0].z = data.z; }
      } else {
        Object.assign(traces[0], { colorscale: SCALE, zmin: data.range ? data.range[0] : lowest, zmax: data.range ? data.range[1] : data.title === "cosine" ? 1 : Math.max(...data.z.flat()),
          colorbar: { thickness: 10, outlinewidth: 0, title: { text: data.title, side: "right", font: { size: 11 } }, tickfont: { size: 10 } } });
      }
      const shapes = data.edges.flatMap((at) => [
        { type: "line", x0: at, x1: at, y0: -0.5, y1: rows - 0.5, line: { color: "#ffffff", width: 1.2 } },
        { type: "line", y0: at, y1: at, x0: -0.5, x1: columns - 0.5, line: { color: "#ffffff", width: 1.2 } }]);
      const height = square ? (narrow() ? 330 : 440) : Math.min(620, Math.max(280, 60 + 9 * rows));
      if ((data.cuts || []).length) { // one shape for all of them, each no thicker than a third of a row
        shapes.push({ type: "path", path: data.cuts.map(([column, above]) => `M${column - 0.5},${above + 0.5}L${column + 0.5},${above + 0.5}`).join(""),
          line: { color: style("--card"), width: Math.min(1.6, 0.3 * (height - 60) / rows) } });
      }
      const named = (data.blocks || []).length && columns > 14;
      const plain = (count) => Object.assign({ showticklabels: count <= 14, showgrid: false, ticks: "", type: "category" }, square ? { constrain: "domain" } : {},
        named ? { showticklabels: true, tickmode: "array", tickvals: data.blocks.map((block) => block.at), ticktext: data.blocks.map((block) => block.name), tickangle: 0, tickfont: { size: 10 } } : {});
      return [traces, layout({ shapes, xaxis: axis("", plain(columns)), yaxis: axis("", Object.assign(plain(rows), { autorange: "reversed" }, square ? { scaleanchor: "x" } : {})),
        height, margin: { l: 20, r: 10, t: 10, b: 20 } })];
    },
  };

  KINDS.holdings = KINDS.stack;

  function images(place, data) {
    place.replaceChildren(...data.rows.map((row) => {
      const strip = document.createElement("div"), words = document.createElement("div"), pictures = document.createElement("div");
      const name = document.createElement("b"), about = document.createElement("span"), image = document.createElement("img");
      strip.className = "strip"; name.textContent = row.name; about.textContent = row.about;
      image.src = `data:image/png;base64,${row.image}`; image.alt = `Example images of ${row.name}`;
      words.append(name, about); pictures.append(image); strip.append(words, pictures);
      return strip;
    }));
  }

  /* What a reader has hidden stays hidden whenever its card is drawn again: place -> names. */
  const hidden = new Map();
  const called = (trace) => trace.legendgroup || trace.name;

  /* A legend that wraps like text and hides what is clicked, instead of one that eats into the plot. */
  function legend(place, traces) {
    const chips = place.parentElement.querySelector(".chips"), groups = new Map(), gone = hidden.get(place);
    traces.forEach((trace, at) => {
      const key = called(trace);
      if (key === undefined || trace.type === "violin" || trace.type === "sankey" || trace.type === "heatmap") { return; }
      if (!groups.has(key)) { groups.set(key, []); }
      groups.get(key).push(at);
    });
    chips.replaceChildren();
    if (groups.size < 2) { return; }
    for (const [key, members] of groups) {
      const trace = traces[members.find((at) => traces[at].name !== undefined)];
      const chip = document.createElement("button"), mark = document.createElement("i");
      const line = trace.line && trace.line.dash ? trace.line.dash : "";
      const paint = (trace.line && trace.line.color) || (trace.name !== "published" && trace.marker && trace.marker.color) || "currentColor";
      chip.type = "button"; chip.className = "chip"; chip.setAttribute("aria-pressed", String(!gone.has(key)));
      mark.style.borderTopColor = Array.isArray(paint) ? paint[0] : paint;
      mark.style.borderTopStyle = /dot$/.test(line) ? "dotted" : /dash/.test(line) ? "dashed" : "solid";
      if (!line || trace.stackgroup || trace.type === "bar") { mark.className = "block"; }
      chip.append(mark, key);
      chip.addEventListener("click", () => {
        const on = chip.getAttribute("aria-pressed") !== "true";
        chip.setAttribute("aria-pressed", String(on));
        if (on) { gone.delete(key); } else { gone.add(key); }
        Plotly.restyle(place, { visible: on ? true : "legendonly" }, members);
      });
      chips.append(chip);
    }
  }

  const places = new Map();
  async function draw(place, figure) {
    if (place.classList.contains("broken")) { place.replaceChildren(); place.classList.remove("broken"); }
    if (figure.kind === "images") {
      images(place, figure.data);
    } else {
      if (!hidden.has(place)) { hidden.set(place, new Set()); }
      const [traces, look] = KINDS[figure.kind](figure.data), gone = hidden.get(place);
      for (const trace of traces) { if (gone.has(called(trace))) { trace.visible = "legendonly"; } }
      await Plotly.react(place, traces, look, { responsive: true, displaylogo: false, displayModeBar: false });
      if (places.get(place) !== figure) { return; } // another was chosen meanwhile
      legend(place, traces);
    }
    place.classList.remove("waiting");
    place.dataset.drawn = figure.name;
  }

  /* A figure that cannot be drawn says so in its card, and the cards after it are drawn. */
  async function attempt(place, figure) {
    places.set(place, figure);
    try {
      await draw(place, figure);
    } catch (error) {
      document.documentElement.dataset.failed = `${figure.name}: ${error.stack || error}`;
      if (places.get(place) !== figure) { return; }
      const words = document.createElement("p");
      words.textContent = `This figure could not be drawn: ${error.message}`;
      Plotly.purge(place);
      place.replaceChildren(words); place.classList.remove("waiting"); place.classList.add("broken");
      place.parentElement.querySelector(".chips").replaceChildren();
      delete place.dataset.drawn;
    }
  }

  function card(family, figures) {
    const place = family.querySelector(".plot"), about = family.querySelector(".about"), box = family.querySelector(".choices");
    const keys = [...new Set(figures.flatMap((figure) => Object.keys(figure.choice)))];
    const chosen = Object.assign({}, figures[0].choice);
    const fits = (figure, wanted) => keys.every((key) => figure.choice[key] === wanted[key]);
    const show = () => {
      const figure = figures.find((each) => fits(each, chosen)) || figures.find((each) => each.choice[keys[0]] === chosen[keys[0]]) || figures[0];
      Object.assign(chosen, figure.choice);
      about.textContent = figure.caption;
      box.querySelectorAll("select").forEach((select) => { select.value = chosen[select.dataset.key]; });
      return attempt(place, figure);
    };
    for (const key of keys) {
      const label = document.createElement("label"), select = document.createElement("select");
      select.dataset.key = key; select.setAttribute("aria-label", key);
      for (const value of [...new Set(figures.map((figure) => figure.choice[key]))]) { select.add(new Option(value, value)); }
      select.addEventListener("change", () => {
        chosen[key] = select.value;
        if (key === "run" || key === "problem") { follow(key, select.value); } else { show(); }
      });
      label.append(key, select); box.append(label);
    }
    return { chosen, keys, figures, show };
  }

  const cards = [];
  /* One choice of a run or a problem moves all figures that offer it. */
  function follow(key, value) {
    for (const each of cards) {
      if (each.keys.includes(key) && each.figures.some((figure) => figure.choice[key] === value)) { each.chosen[key] = value; each.show(); }
    }
  }

  function themes() {
    const button = document.getElementById("theme"), root = document.documentElement;
    const again = () => { for (const [place, figure] of places) { attempt(place, figure); } };
    button.addEventListener("click", () => {
      const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
      root.dataset.theme = dark ? "light" : "dark"; again();
    });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", again);
    let before = narrow();
    window.addEventListener("resize", () => { if (narrow() !== before) { before = narrow(); again(); } });
  }

  async function start() {
    if (!("DecompressionStream" in window)) { throw new Error("This browser is older than 2023 and cannot unpack the figures; the tables are complete."); }
    const [library, text] = await Promise.all([unpacked("library"), unpacked("figures")]);
    const script = document.createElement("script");
    script.textContent = library; document.head.append(script);
    const figures = JSON.parse(text);
    window.report = { figures };
    for (const family of document.querySelectorAll("[data-family]")) {
      cards.push(card(family, figures.filter((figure) => figure.family === family.dataset.family)));
    }
    themes();
    for (const each of cards) { await each.show(); await new Promise((go) => setTimeout(go)); }
    document.documentElement.dataset.ready = "yes";
  }

  start().catch((error) => {
    const box = document.getElementById("problem");
    box.textContent = `The figures could not be drawn: ${error.message}`; box.style.display = "block";
    document.documentElement.dataset.failed = String(error.stack || error);
  });
})();
