// Drawing and words: no state, no network. Everything that somebody wrote goes into the page as text.
"use strict";
const $ = (id) => document.getElementById(id);
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
const el = (tag, text, cls) => {
  const found = document.createElement(tag);
  if (text !== undefined && text !== null) found.textContent = text;
  if (cls) found.className = cls;
  return found;
};
const svg = (tag, attributes) => {
  const found = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [key, value] of Object.entries(attributes)) found.setAttribute(key, value);
  return found;
};
function bytes(n) {
  if (n === null || n === undefined) return "–";
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (n < 1024) return unit === "B" ? `${n.toFixed(0)} B` : `${n.toFixed(1)} ${unit}`;
    n /= 1024;
  }
  return `${n.toFixed(1)} TiB`;
}
function count(n) {
  if (n === null || n === undefined) return "–";
  for (const [size, unit] of [[1e9, "B"], [1e6, "M"], [1e3, "k"]]) if (n >= size * 0.8) return (n / size).toFixed(n < 10 * size ? 2 : 1) + unit;
  return n.toFixed(0);
}
function span(s) {
  if (s === null || s === undefined) return "–";
  if (s < 10) return `${s.toFixed(1)} s`;
  for (const [big, small, length, part] of [["d", "h", 86400, 3600], ["h", "min", 3600, 60], ["min", "s", 60, 1]]) {
    if (s >= length) {
      const rest = Math.floor((s % length) / part);
      return `${Math.floor(s / length)} ${big}` + (rest ? ` ${rest} ${small}` : "");
    }
  }
  return `${s.toFixed(0)} s`;
}
// As the terminal has it: whole where it is large.
const pace = (n) => (n === null || n === undefined ? "–" : n >= 100 ? Math.round(n).toLocaleString("en") : String(Number(n.toPrecision(3))));
const clock = (at) => new Date(at * 1000).toLocaleTimeString();
const percent = (x) => (x === null || x === undefined ? "–" : `${(100 * x).toFixed(x > 0.995 && x < 1 ? 1 : 0)} %`);
// Contributors are bits in hexadecimal, of any number of peers.
function bit(hex, number) {
  const at = hex.length - 1 - (number >> 2);
  return at >= 0 && ((parseInt(hex[at], 16) >> (number & 3)) & 1) === 1;
}
// A row a member, a column a round; where rounds outnumber pixels, a column stands for several, and the worst of them is shown.
function timeline(canvas, width, rounds, first, members, chosen) {
  const scale = window.devicePixelRatio || 1, label = width < 560 ? 92 : 132, row = 20, foot = 18;
  const height = Math.max(1, members.length) * row + foot, many = rounds.round.length - first;
  canvas.width = width * scale; canvas.height = height * scale;
  canvas.style.width = width + "px"; canvas.style.height = height + "px";
  const c = canvas.getContext("2d");
  c.scale(scale, scale);
  c.font = "12.5px system-ui, sans-serif"; c.textBaseline = "middle";
  const room = width - label, cell = room / Math.max(1, many), columns = Math.min(many, Math.floor(room));
  const colours = [colour("idle"), colour("lagoon"), colour("sun"), colour("red")];
  members.forEach((member, line) => {
    const y = line * row;
    c.fillStyle = member.member ? colour("ink") : colour("soft");
    c.fillText(member.name + (member.you ? " (you)" : ""), 0, y + row / 2, label - 8);
  });
  if (many <= 0) return { label, cell, many, first };
  const step = many / columns, w = cell >= 1 ? cell : room / columns;
  const gap = w > 4 ? 1.5 : w > 2 ? 0.5 : 0;
  for (let column = 0; column < columns; column++) {
    const from = first + Math.floor(column * step), to = Math.max(from + 1, first + Math.floor((column + 1) * step));
    members.forEach((member, line) => {
      let worst = 1;
      for (let i = from; i < to; i++) {
        let is = 0;
        if (bit(rounds.lost[i], member.number)) is = 3;
        else if (bit(rounds.who[i], member.number)) is = rounds.slowest.length && rounds.slowest[i] === member.number ? 2 : 1;
        if (i === from || is === 3 || (is === 0 && worst !== 3)) worst = is;
      }
      c.fillStyle = colours[worst];
      c.fillRect(label + column * w, line * row + 3, Math.max(0.6, w - gap), row - 6);
    });
  }
  c.fillStyle = colour("soft"); c.font = "11px system-ui, sans-serif";
  const y = members.length * row + foot / 2 + 1, marks = Math.min(many, Math.max(1, Math.floor(room / 90)));
  for (let m = 0; m < marks; m++) {
    const i = first + Math.floor((m * many) / marks);
    c.fillText(String(rounds.round[i]), label + (i - first) * (w / step), y);
  }
  if (chosen >= first && chosen < rounds.round.length) {
    c.strokeStyle = colour("ink"); c.lineWidth = 1.5;
    c.strokeRect(label + (chosen - first) * (w / step) - 0.5, 1, Math.max(2, w), members.length * row - 2);
  }
  return { label, cell: w / step, many, first };
}
const MANY = 8, words = (p) => (p.state === "lost" ? "lost" : [p.path || "path not known", p.rtt_ms === null ? "" : `${p.rtt_ms.toFixed(0)} ms`].filter(Boolean).join(", "));
// How the others are reached: a picture of a few, a list of many, or of those whose names would lie over one another.
function paths(box, peers) {
  if (peers.filter((p) => p.member && !p.you).length >= MANY) return pathList(box, peers);
  pathPicture(box, peers);
  if (overlaps([...box.querySelectorAll("text")].map((text) => text.getBBox()))) pathList(box, peers);
}
const overlaps = (boxes) => boxes.some((a, i) => boxes.slice(0, i).some((b) => a.x < b.x + b.width && b.x < a.x + a.width && a.y < b.y + b.height && b.y < a.y + a.height));
// Who is lost comes first, then who is reached through others.
function pathList(box, peers) {
  const list = el("ul", null, "reached"); list.tabIndex = 0; list.setAttribute("aria-label", "How members are reached");
  const order = { relay: 1, none: 1, "": 2, punched: 3 };
  const rank = (p) => (p.state === "lost" ? 0 : order[p.path] ?? 4);
  list.append(...peers.filter((p) => p.member && !p.you).sort((a, b) => rank(a) - rank(b) || a.number - b.number).map((peer) => {
    const item = el("li", null, peer.state === "lost" ? "lost" : peer.path || "unknown");
    item.title = `${peer.path_text || "path not known"} ${peer.why}`.trim();
    item.append(el("span", peer.name), el("span", words(peer), "note"));
    return item;
  }));
  box.replaceChildren(list);
}
// This node in the middle, the others around it; the line says how they are reached.
function pathPicture(box, peers) {
  const width = box.clientWidth || 480, height = 230, others = peers.filter((p) => p.member && !p.you), me = peers.find((p) => p.you);
  const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": others.map((p) => `${p.name}: ${p.path || "path not known"}, ${p.state}`).join("; ") || "no other member" });
  const cx = width / 2, cy = height / 2 - 4, rx = Math.min(width / 2 - 74, 210), ry = 80;
  const styles = { direct: ["lagoon", ""], lan: ["lagoon", ""], punched: ["leaf", "7 4"], relay: ["sun", "2 5"] };
  others.forEach((peer, i) => {
    const angle = (2 * Math.PI * i) / others.length - Math.PI / 2 + Math.PI / Math.max(2, others.length);
    const x = cx + rx * Math.cos(angle), y = cy + ry * Math.sin(angle), lost = peer.state === "lost";
    const [name, dashes] = styles[peer.path] || ["soft", "1 6"];
    const line = svg("line", { x1: cx, y1: cy, x2: x, y2: y, "stroke-width": 2.2, stroke: colour(lost ? "red" : name), "stroke-dasharray": dashes, "stroke-linecap": "round", opacity: lost ? 0.45 : 1 });
    const title = svg("title", {}); title.textContent = `${peer.name}: ${peer.path_text || "path not known"} ${peer.why}`; line.append(title);
    const dot = svg("circle", { cx: x, cy: y, r: 8, fill: colour(lost ? "red" : name), stroke: colour("card"), "stroke-width": 3 });
    const text = svg("text", { x, y: y + 24, "text-anchor": "middle" }); text.textContent = peer.name;
    const soft = svg("text", { x, y: y + 38, "text-anchor": "middle", class: "soft" });
    soft.textContent = words(peer);
    picture.append(line, dot, text, soft);
  });
  picture.append(svg("circle", { cx, cy, r: 11, fill: colour("ink"), stroke: colour("card"), "stroke-width": 3 }));
  const text = svg("text", { x: cx, y: cy + 27, "text-anchor": "middle" });
  text.textContent = me ? `${me.name} (you)` : "this node"; picture.append(text);
  box.replaceChildren(picture);
}
