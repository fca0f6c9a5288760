"use strict";
// Draws what page.py has put into the element "data": graphs, a timeline, a roofline. No library, no request.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const $ = (selector, within = document) => within.querySelector(selector);
  const $$ = (selector, within = document) => [...within.querySelectorAll(selector)];
  const regions = new Map(data.regions.map((region) => [region.number, region]));

  const svg = (name, attributes = {}, parent = null, text = null) => {
    const element = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    if (text !== null) element.textContent = text;
    if (parent) parent.append(element);
    return element;
  };
  const html = (name, text = null, parent = null, className = "") => {
    const element = document.createElement(name);
    if (text !== null) element.textContent = text;
    if (className) element.className = className;
    if (parent) parent.append(element);
    return element;
  };

  // ------------------------------------------------------------------------------------------------ colours

  const UNCOLOURED = new Set(["", "input", "output", "graph"]);
  const kinds = [...new Set(data.regions.map((region) => region.kind))];
  const colourOf = (kind) => (kinds.includes(kind) ? `var(--k${Math.min(kinds.indexOf(kind), 7)})` : "var(--plain)");
  for (const legend of $$(".legend")) {
    for (const kind of kinds) {
      const count = data.regions.filter((region) => region.kind === kind).length;
      html("span", `${kind} ${count}`, legend, "kind").style.setProperty("--color", colourOf(kind));
    }
  }
  for (const label of $$(".kind[data-kind]")) label.style.setProperty("--color", colourOf(label.dataset.kind));

  // ------------------------------------------------------------------------------------------------ tooltip

  const tip = $("#tip");
  const tipped = (element, text) => {
    element.addEventListener("pointermove", (event) => {
      tip.textContent = text();
      tip.hidden = false;
      tip.style.left = `${Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8)}px`;
      tip.style.top = `${Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 8)}px`;
    });
    element.addEventListener("pointerleave", () => { tip.hidden = true; });
  };

  // ------------------------------------------------------------------------------------------------- graphs

  const NODE_HEIGHT = 38, LEAST = 0.02, MOST = 3, READABLE = 0.42;
  const MEASURE = { title: 7.2, subtitle: 6.2 };  // pixels of a character

  /** One graph in its frame, which moves and zooms. */
  class Pane {
    constructor(figure) {
      this.figure = figure;
      this.frame = $("svg", figure);
      this.note = $(".note", figure);
      this.at = { x: 0, y: 0, scale: 1 };
      this.drag();
      for (const button of $$("button", figure)) {
        button.addEventListener("click", () => {
          if (button.dataset.do === "fit") this.fit();
          else this.zoom(button.dataset.do === "in" ? 1.3 : 1 / 1.3);
        });
      }
    }

    draw(drawing) {
      this.drawing = drawing;
      this.frame.replaceChildren();
      this.view = svg("g", {}, this.frame);
      this.elements = new Map();
      for (const edge of drawing.edges) svg("path", { class: "link", d: pathOf(edge) }, this.view);
      for (const node of drawing.nodes) this.drawNode(node);
      this.note.textContent = `${drawing.nodes.length} nodes`;
      this.top();
    }

    drawNode(node) {
      const width = Math.max(node.title.length * MEASURE.title, node.subtitle.length * MEASURE.subtitle) + 18;
      const group = svg("g", { class: "node", "data-name": node.name, transform: `translate(${node.x} ${node.y})` }, this.view);
      if (!UNCOLOURED.has(node.kind)) {
        group.classList.add("in");
        group.style.setProperty("--color", colourOf(node.kind));
      }
      if (node.kind === "input" || node.kind === "output") group.classList.add("edge");
      svg("rect", { x: -width / 2, y: -NODE_HEIGHT / 2, width, height: NODE_HEIGHT, rx: node.kind === "graph" ? 14 : 5 }, group);
      svg("text", { y: node.subtitle ? -3 : 4 }, group, node.title);
      if (node.subtitle) svg("text", { y: 12, class: "sub" }, group, node.subtitle);
      group.addEventListener("click", () => choose(node.name, this));
      this.elements.set(node.name, group);
    }

    size() {
      return { width: this.frame.clientWidth || 600, height: this.frame.clientHeight || 500 };
    }

    /** From the first node on, as wide as it fits, but readable. */
    top() {
      const { width, height } = this.size();
      const scale = Math.min(1, Math.max(0.62, (width - 24) / this.drawing.width, (height - 24) / this.drawing.height));
      const first = this.drawing.nodes[0];
      const centre = this.drawing.width * scale <= width ? this.drawing.width / 2 : first ? first.x : 0;
      this.show(width / 2 - centre * scale, 4, scale);
    }

    fit() {
      const { width, height } = this.size();
      const scale = Math.min(1, (width - 24) / this.drawing.width, (height - 24) / this.drawing.height);
      this.show((width - this.drawing.width * scale) / 2, (height - this.drawing.height * scale) / 2, scale);
    }

    centre(name) {
      const node = this.drawing.nodes.find((one) => one.name === name);
      if (!node) return;
      const { width, height } = this.size();
      const scale = Math.max(this.at.scale, 0.7);
      this.show(width / 2 - node.x * scale, height / 2 - node.y * scale, scale);
    }

    zoom(factor, x = this.size().width / 2, y = this.size().height / 2) {
      const scale = Math.min(MOST, Math.max(LEAST, this.at.scale * factor));
      const by = scale / this.at.scale;
      this.show(x - (x - this.at.x) * by, y - (y - this.at.y) * by, scale);
    }

    show(x, y, scale) {
      this.at = { x, y, scale };
      this.view.setAttribute("transform", `translate(${x} ${y}) scale(${scale})`);
      this.view.classList.toggle("far", scale < READABLE);
    }

    drag() {
      let from = null;
      this.frame.addEventListener("pointerdown", (event) => { from = { x: event.clientX - this.at.x, y: event.clientY - this.at.y, id: event.pointerId }; });
      this.frame.addEventListener("pointermove", (event) => {
        if (!from || from.id !== event.pointerId) return;
        const x = event.clientX - from.x, y = event.clientY - from.y;
        if (!this.frame.hasPointerCapture(from.id)) {
          if (Math.hypot(x - this.at.x, y - this.at.y) < 4) return;  // a click
          this.frame.setPointerCapture(from.id);
          this.frame.classList.add("moving");
        }
        this.show(x, y, this.at.scale);
      });
      const end = () => { from = null; this.frame.classList.remove("moving"); };
      this.frame.addEventListener("pointerup", end);
      this.frame.addEventListener("pointercancel", end);
      this.frame.addEventListener("wheel", (event) => {
        event.preventDefault();
        const box = this.frame.getBoundingClientRect();
        if (event.ctrlKey || event.metaKey) this.zoom(Math.exp(-event.deltaY / 300), event.clientX - box.left, event.clientY - box.top);
        else this.show(this.at.x - event.deltaX, this.at.y - event.deltaY, this.at.scale);
      }, { passive: false });
      this.frame.addEventListener("keydown", (event) => {
        const moves = { ArrowUp: [0, 60], ArrowDown: [0, -60], ArrowLeft: [60, 0], ArrowRight: [-60, 0] };
        if (event.key in moves) this.show(this.at.x + moves[event.key][0], this.at.y + moves[event.key][1], this.at.scale);
        else if (event.key === "+" || event.key === "=") this.zoom(1.3);
        else if (event.key === "-") this.zoom(1 / 1.3);
        else if (event.key === "0") this.fit();
        else return;
        event.preventDefault();
      });
    }
  }

  /** A curve through the points of an edge, which leaves and arrives vertically. */
  function pathOf(numbers) {
    const points = [];
    for (let i = 0; i < numbers.length; i += 2) points.push([numbers[i], numbers[i + 1]]);
    const last = points.length - 1;
    points[0] = [points[0][0], points[0][1] + NODE_HEIGHT / 2];
    points[last] = [points[last][0], points[last][1] - NODE_HEIGHT / 2];
    let path = `M${points[0].join(" ")}`;
    for (let i = 1; i <= last; i++) {
      const [x0, y0] = points[i - 1], [x1, y1] = points[i], middle = (y0 + y1) / 2;
      path += `C${x0} ${middle} ${x1} ${middle} ${x1} ${y1}`;
    }
    return path;
  }

  const panes = $$(".pane").map((figure) => new Pane(figure));
  const [before, after] = panes;
  const choice = $("#graph-choice");
  let graph = null;
  data.graphs.forEach((one, index) => { html("option", one.name || "the model", choice).value = index; });
  choice.closest("label").hidden = data.graphs.length < 2;

  function showGraph(index) {
    graph = data.graphs[index];
    choice.value = index;
    before.draw(graph.before);
    after.draw(graph.after);
    search();
  }
  choice.addEventListener("change", () => { showGraph(choice.value); details(null); });

  /** Shows what is known of a node, and the nodes of its region on both sides. */
  function choose(name, pane, follow = true) {
    const node = pane.drawing.nodes.find((one) => one.name === name);
    for (const element of $$(".node.chosen, .node.same, .span.chosen")) element.classList.remove("chosen", "same");
    if (!node) return;
    pane.elements.get(name).classList.add("chosen");
    for (const other of panes) {
      const same = other.drawing.nodes.filter((one) => (node.region !== null ? one.region === node.region : one.name === name));
      for (const one of same) other.elements.get(one.name).classList.add("same");
      if (other !== pane && follow && same.length) other.centre(same[0].name);
    }
    for (const element of $$(".span")) {
      if (pane === after && element.dataset.graph === graph.name && element.dataset.nodes.split(",").includes(name)) element.classList.add("chosen");
    }
    details(node);
    history.replaceState(null, "", `#node=${encodeURIComponent(graph.name)}/${encodeURIComponent(name)}`);
  }

  const CODE = new Set(["expression", "call", "line", "source", "replaces", "reads", "module"]);

  function details(node) {
    const panel = $("#details");
    panel.replaceChildren();
    if (!node) return;
    html("h3", node.title, panel);
    const list = html("dl", null, panel);
    const region = regions.get(node.region);
    for (const [key, text] of [...node.details, ...(region ? [["region", region.node], ...region.details] : [])]) {
      html("dt", key, list);
      html("dd", text, list, CODE.has(key) ? "code" : "");
    }
    const own = node.details.find(([key]) => key === "has a graph of its own");
    const index = own ? data.graphs.findIndex((one) => one.name === own[1]) : -1;
    if (index >= 0) html("button", "show its graph", panel).addEventListener("click", () => { showGraph(index); details(null); });
  }

  // ------------------------------------------------------------------------------------------------- search

  const field = $("#search");
  let found = [], next = 0;

  function search() {
    const wanted = field.value.trim().toLowerCase();
    found = [];
    for (const pane of panes) {
      pane.view.classList.toggle("searching", wanted !== "");
      for (const node of pane.drawing.nodes) {
        const text = [node.name, node.title, node.subtitle, ...node.details.map((item) => item[1])].join("\n").toLowerCase();
        const hit = wanted !== "" && text.includes(wanted);
        pane.elements.get(node.name).classList.toggle("found", hit);
        if (hit) found.push([pane, node.name]);
      }
    }
    next = 0;
    $("#found").textContent = wanted ? `${found.length} found` : "";
    return found.length;
  }
  field.addEventListener("input", search);
  field.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || !found.length) return;
    const [pane, name] = found[next % found.length];
    next += 1;
    pane.centre(name);
    choose(name, pane);
    $("#found").textContent = `${((next - 1) % found.length) + 1} of ${found.length}`;
  });

  /** "#node=graph/name" chooses a node, "#search=text" searches. */
  function follow() {
    const [key, value = ""] = location.hash.slice(1).split("=");
    if (key === "search") {
      field.value = decodeURIComponent(value);
      if (search()) found[0][0].centre(found[0][1]);
    }
    if (key !== "node") return;
    const [path, name] = value.split("/").map(decodeURIComponent);
    const index = data.graphs.findIndex((one) => one.name === path);
    if (index < 0) return;
    if (data.graphs[index] !== graph) showGraph(index);
    const pane = [after, before].find((one) => one.elements.has(name));
    if (!pane) return;
    pane.centre(name);
    choose(name, pane);
    $("#graph").scrollIntoView();
  }
  addEventListener("hashchange", follow);

  // ----------------------------------------------------------------------------------------------- timeline

  const microseconds = (time) => (time < 1000 ? `${+time.toPrecision(3)} µs` : `${+(time / 1000).toPrecision(3)} ms`);

  /** Steps of 1, 2 or 5 times a power of ten, about so many up to a number. */
  function ticks(most, count) {
    const rough = most / count, power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((one) => one * power).find((one) => one >= rough);
    return Array.from({ length: Math.floor(most / step) + 1 }, (_, i) => i * step);
  }

  function timeline() {
    const frame = $("#tracks"), tracks = data.tracks.filter((track) => track.spans.length);
    if (!tracks.length) { frame.style.display = "none"; return; }
    const LEFT = 70, ROW = 44, TOP = 12, width = Math.max(frame.clientWidth || 900, 300), height = TOP + ROW * tracks.length + 26;
    const timed = tracks[0].timed;
    const total = Math.max(...tracks.map((track) => Math.max(...track.spans.map((span) => span[0] + span[1]))));
    frame.setAttribute("viewBox", `0 0 ${width} ${height}`);
    let from = 0, to = total;

    function draw() {
      frame.replaceChildren();
      const x = (time) => LEFT + ((time - from) / (to - from)) * (width - LEFT - 12);
      const body = svg("svg", { x: LEFT, y: 0, width: width - LEFT, height, viewBox: `${LEFT} 0 ${width - LEFT} ${height}` }, frame);
      if (timed) {
        for (const tick of ticks(total, (8 * total) / (to - from))) {
          if (tick < from || tick > to) continue;
          svg("line", { class: "grid", x1: x(tick), x2: x(tick), y1: TOP - 4, y2: height - 20 }, body);
          svg("text", { x: x(tick), y: height - 6, "text-anchor": tick === 0 ? "start" : "middle" }, body, microseconds(tick));
        }
      }
      tracks.forEach((track, row) => {
        svg("text", { class: "track", x: 8, y: TOP + ROW * row + 22 }, frame, track.name);
        for (const [start, time, name, graphName, nodes, ours] of track.spans) {
          if (start + time < from || start > to) continue;
          const span = svg("rect", {
            class: ours ? "span ours" : "span", x: x(start), y: TOP + ROW * row, height: ROW - 12, rx: 1,
            width: Math.max(0.8, x(start + time) - x(start) - 0.6), "data-graph": graphName, "data-nodes": nodes.join(","),
          }, body);
          tipped(span, () => [name, timed ? microseconds(time) : "", nodes.join(", "), ours ? "kernel of fxfuse" : "torch"].filter(Boolean).join("\n"));
          span.addEventListener("click", () => {
            if (!nodes.length) return;
            const index = data.graphs.findIndex((one) => one.name === graphName);
            if (index >= 0 && data.graphs[index] !== graph) showGraph(index);
            if (after.elements.has(nodes[0])) { after.centre(nodes[0]); choose(nodes[0], after); }
          });
        }
      });
    }

    const time = (event) => from + ((event.clientX - frame.getBoundingClientRect().left - LEFT) / (width - LEFT - 12)) * (to - from);
    const limit = (first, last) => {
      const span = Math.min(total, Math.max(total / 2000, last - first));
      from = Math.min(Math.max(0, first), total - span);
      to = from + span;
      draw();
    };
    frame.addEventListener("wheel", (event) => {
      if (!(event.ctrlKey || event.metaKey || event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY))) return;
      event.preventDefault();
      if (event.ctrlKey || event.metaKey) {
        const at = time(event), by = Math.exp(event.deltaY / 300);
        limit(at - (at - from) * by, at + (to - at) * by);
      } else {
        const by = ((event.deltaX || event.deltaY) / width) * (to - from);
        limit(from + by, to + by);
      }
    }, { passive: false });
    let held = null;
    frame.addEventListener("pointerdown", (event) => { held = { at: event.clientX, from, to }; });
    frame.addEventListener("pointermove", (event) => {
      if (!held || Math.abs(event.clientX - held.at) < 4) return;
      const by = ((held.at - event.clientX) / (width - LEFT)) * (held.to - held.from);
      limit(held.from + by, held.to + by);
    });
    addEventListener("pointerup", () => { held = null; });
    frame.addEventListener("dblclick", () => limit(0, total));
    draw();
    const legend = html("p", null, null, "note");
    frame.after(legend);
    for (const [name, colour] of [["kernels of fxfuse", "var(--accent)"], ["torch", "var(--plain)"]]) {
      html("span", name, legend, "kind").style.setProperty("--color", colour);
      legend.append(" \u2002 ");
    }
    legend.append("Drag to move, Ctrl and scroll to zoom, double click for all of it.");
  }

  // ----------------------------------------------------------------------------------------------- roofline

  const scaled = (number, unit) => {
    const steps = [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]];
    const [size, prefix] = steps.find(([one]) => number >= one) || [1, ""];
    return `${+(number / size).toPrecision(3)} ${prefix}${unit}`;
  };

  function roofline() {
    const frame = $("#roof"), points = data.regions.filter((region) => region.point);
    if (!points.length) { frame.style.display = "none"; return; }
    const width = Math.max(frame.clientWidth || 900, 300), height = 360, LEFT = 86, BOTTOM = 44, TOP = 22, RIGHT = 24;
    frame.setAttribute("viewBox", `0 0 ${width} ${height}`);
    const roofs = data.roofs;
    const speeds = roofs ? roofs.speeds : [];
    const xs = points.map((region) => region.point.intensity), ys = points.map((region) => region.point.speed);
    const knees = speeds.map(([, speed]) => speed / roofs.bandwidth);
    const x0 = Math.log10(Math.min(...xs, ...knees)) - 0.4, x1 = Math.log10(Math.max(...xs, ...knees)) + 0.5;
    const top = Math.max(...ys, ...speeds.map((item) => item[1]), ...(roofs && !speeds.length ? [roofs.bandwidth * 10 ** x1] : []));
    const y0 = Math.log10(Math.min(...ys)) - 0.4, y1 = Math.log10(top) + 0.25;
    const x = (value) => LEFT + ((Math.log10(value) - x0) / (x1 - x0)) * (width - LEFT - RIGHT);
    const y = (value) => TOP + ((y1 - Math.log10(value)) / (y1 - y0)) * (height - TOP - BOTTOM);
    for (let power = Math.ceil(x0); power <= x1; power++) {
      svg("line", { class: "grid", x1: x(10 ** power), x2: x(10 ** power), y1: TOP, y2: height - BOTTOM }, frame);
      svg("text", { x: x(10 ** power), y: height - BOTTOM + 16, "text-anchor": "middle" }, frame, String(+(10 ** power).toPrecision(1)));
    }
    for (let power = Math.ceil(y0); power <= y1; power++) {
      svg("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: y(10 ** power), y2: y(10 ** power) }, frame);
      svg("text", { x: LEFT - 8, y: y(10 ** power) + 4, "text-anchor": "end" }, frame, scaled(10 ** power, "FLOP/s"));
    }
    svg("text", { x: (LEFT + width - RIGHT) / 2, y: height - 8, "text-anchor": "middle" }, frame, "operations for each byte (FLOP/B)");
    if (roofs) {
      const body = svg("svg", { x: LEFT, y: TOP, width: width - LEFT - RIGHT, height: height - TOP - BOTTOM, viewBox: `${LEFT} ${TOP} ${width - LEFT - RIGHT} ${height - TOP - BOTTOM}` }, frame);
      const most = Math.max(...speeds.map((item) => item[1]), 0) || roofs.bandwidth * 10 ** x1;
      const knee = most / roofs.bandwidth;
      svg("path", { class: "roofline", d: `M${x(10 ** x0)} ${y(roofs.bandwidth * 10 ** x0)}L${x(knee)} ${y(most)}` }, body);
      const at = 10 ** (x0 + 0.1);
      const slope = Math.atan2(y(most) - y(roofs.bandwidth * at), x(knee) - x(at)) * (180 / Math.PI);
      const middle = Math.max(at, 10 ** Math.max(x0 + 0.1, y0 - Math.log10(roofs.bandwidth) + 0.15));
      svg("text", { class: "roof", transform: `translate(${x(middle)} ${y(roofs.bandwidth * middle) - 7}) rotate(${slope})` }, body, `${scaled(roofs.bandwidth, "B/s")} copied`);
      for (const [dtype, speed] of speeds) {
        svg("path", { class: "roofline", d: `M${x(speed / roofs.bandwidth)} ${y(speed)}L${x(10 ** x1)} ${y(speed)}` }, body);
        svg("text", { class: "roof", x: x(10 ** x1) - 4, y: y(speed) - 7, "text-anchor": "end" }, body, `${scaled(speed, "FLOP/s")}: ${dtype} products`);
      }
    }
    for (const region of points) {
      const point = svg("circle", { class: "point", cx: x(region.point.intensity), cy: y(region.point.speed), r: 5.5 }, frame);
      point.style.setProperty("--color", colourOf(region.kind));
      tipped(point, () => `${region.node}\n${region.epilogue}\n${scaled(region.point.speed, "FLOP/s")}, ${+region.point.intensity.toPrecision(3)} FLOP/B`);
      point.addEventListener("click", () => {
        for (const [index, one] of data.graphs.entries()) {
          const node = one.after.nodes.find((item) => item.region === region.number);
          if (!node) continue;
          if (one !== graph) showGraph(index);
          after.centre(node.name);
          choose(node.name, after);
          $("#graph").scrollIntoView();
          return;
        }
      });
    }
  }

  if (data.graphs.length) showGraph(0);
  timeline();
  roofline();
  follow();
})();
