// An image of the reader's own, asked about as any caller would, and its answer drawn beside it.

import { scroll } from "./charts.js";
import { h, patch } from "./dom.js";
import { decimal, percent } from "./words.js";

const at = (id) => document.getElementById(id);
let size = null; // of the model's images: types, height, width and shortest_edge
let asked = 0; // the newest request; answers to older ones are dropped

export function drawTry(service) {
  size = service.image;
  at("try").hidden = size === null;
  if (size !== null) at("try-file").accept = size.types.join(",");
}

at("try-form").addEventListener("submit", (event) => event.preventDefault());
for (const id of ["try-file", "try-key"]) at(id).addEventListener("change", ask);

async function ask() {
  const file = at("try-file").files[0];
  if (!file) return;
  asked += 1;
  const mine = asked;
  at("try-pictures").hidden = true; // those of another image
  tell(`Asking about ${file.name}`);
  try {
    const answer = await answerTo(file);
    if (mine === asked) await draw(file, answer, () => mine === asked);
  } catch (error) {
    if (mine === asked) tell(error.message);
  }
}

async function answerTo(file) {
  const headers = { "Content-Type": file.type, Accept: "application/json" };
  if (at("try-key").value) headers.Authorization = `Bearer ${at("try-key").value}`;
  const response = await fetch("predict", { method: "POST", headers, body: file });
  const said = await response.json().catch(() => null);
  if (response.status === 401) at("try-key-label").hidden = false;
  if (!response.ok) throw new Error(said?.error?.message ?? `The service answered ${response.status}`);
  return said;
}

// Another image may be asked about while pictures are read: then nothing is drawn any more.
async function draw(file, answer, isNewest) {
  const image = await createImageBitmap(file);
  const map = "class_map" in answer ? await bitmapOf(answer.class_map) : null;
  if (!isNewest()) return;
  paint("try-image", image, ...kept(image));
  at("try-drawn").hidden = !("class_map" in answer || "keypoints" in answer);
  if (map !== null) drawMap(map, answer);
  else if ("keypoints" in answer) drawJoints(image, answer);
  else patch(at("try-table"), facts(answer));
  at("try-pictures").hidden = false;
  const score = Number.isFinite(answer.score) ? `, score ${answer.score.toFixed(3)}` : "";
  tell(`Left after block ${answer.exit}${score}`);
}

async function bitmapOf(content) {
  const bytes = Uint8Array.from(atob(content), (letter) => letter.charCodeAt(0));
  return createImageBitmap(new Blob([bytes], { type: "image/png" }));
}

function drawMap(map, { classes }) {
  paint("try-answer", map, 0, 0, map.width, map.height);
  at("try-answer").setAttribute("aria-label", `Class map: ${classes.map((one) => one.name).join(", ")}`);
  const rows = classes.map((one) => [[swatch(one.colour), one.name], percent(one.share)]);
  patch(at("try-table"), scroll("Classes by their share of the image", ["Class", "Share"], rows));
}

function drawJoints(image, { keypoints }) {
  const pen = paint("try-answer", image, ...kept(image));
  const { width, height } = pen.canvas;
  pen.fillStyle = "rgb(0 0 0 / 45%)";
  pen.fillRect(0, 0, width, height);
  keypoints.forEach(({ x, y, score }, joint) => {
    pen.fillStyle = hue(joint, keypoints.length);
    pen.globalAlpha = 0.35 + 0.65 * score; // the unsure are faint
    pen.beginPath();
    pen.arc(x + 0.5, y + 0.5, Math.max(2, width / 60), 0, 2 * Math.PI); // 0 is the middle of a pixel
    pen.fill();
  });
  pen.globalAlpha = 1;
  at("try-answer").setAttribute("aria-label", `Image with ${keypoints.length} joints`);
  const rows = keypoints.map((one, joint) => [
    [swatch(hue(joint, keypoints.length)), one.joint], decimal(one.x), decimal(one.y), percent(one.score)]);
  patch(at("try-table"), scroll("Joints, in pixels of the model's image", ["Joint", "x", "y", "Score"], rows));
}

const hue = (index, number) => `hsl(${(360 * index) / number} 85% 60%)`;

const swatch = (colour) => h("i", { class: "swatch", style: { background: colour }, "aria-hidden": "true" });

function facts(answer) {
  const rows = Object.entries(answer).filter(([name]) => name !== "request_id").map(([name, value]) => [name, String(value)]);
  return scroll("Answer of the service", ["Field", "Value"], rows);
}

// Left, top, width and height of what the model is shown of an image, as the service cuts it.
function kept({ width, height }) {
  if (size.shortest_edge === null) return [0, 0, width, height];
  const scale = Math.min(width, height) / size.shortest_edge;
  const [w, hgt] = [size.width * scale, size.height * scale];
  return [(width - w) / 2, (height - hgt) / 2, w, hgt];
}

function paint(id, image, left, top, width, height) {
  const canvas = at(id);
  canvas.width = size.width;
  canvas.height = size.height;
  const pen = canvas.getContext("2d");
  pen.imageSmoothingEnabled = id === "try-image";
  pen.drawImage(image, left, top, width, height, 0, 0, size.width, size.height);
  return pen;
}

function tell(words) {
  at("try-said").textContent = words;
}
