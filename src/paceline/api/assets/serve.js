"use strict";

const find = (id) => document.getElementById(id);
const drop = find("drop"), file = find("file"), preview = find("preview"), status = find("status"), list = find("classes");
let asked = 0;

function say(text, bad = false) {
  status.textContent = text;
  status.className = bad ? "bad" : "";
}

async function classify(image) {
  const number = ++asked;  // a response that arrives after the next image is dropped
  URL.revokeObjectURL(preview.src);
  preview.src = URL.createObjectURL(image);
  preview.alt = image.name ? `The image ${image.name}` : "The image";
  preview.hidden = false;
  list.replaceChildren();
  say("Classifying ...");
  let answer;
  try {
    const response = await fetch("/predict", { method: "POST", body: image });
    answer = await response.json();
  } catch {
    answer = { error: "the server does not respond" };
  }
  if (number !== asked) return;
  if (answer.error) return say(`Error: ${answer.error}`, true);
  say(`${answer.top[0].name}, ${percent(answer.top[0].probability)}`);
  list.replaceChildren(...answer.top.map(row));
}

const percent = (value) => `${(100 * value).toFixed(1)}%`;

function element(kind, name, text = "") {
  const made = document.createElement(kind);
  made.className = name;
  made.textContent = text;
  return made;
}

function row(each) {
  const line = document.createElement("li"), track = element("div", "track"), bar = element("div", "bar");
  bar.style.width = percent(each.probability);
  track.append(bar);
  track.setAttribute("aria-hidden", "true");
  line.append(element("span", "name", each.name), element("span", "value", percent(each.probability)), track);
  if (each.id !== each.name) line.title = each.id;
  return line;
}

preview.addEventListener("error", () => { preview.hidden = true; });  // a format that only the server reads
file.addEventListener("change", () => { if (file.files[0]) classify(file.files[0]); });
for (const kind of ["dragenter", "dragover"]) {
  document.addEventListener(kind, (event) => { event.preventDefault(); drop.classList.add("over"); });
}
document.addEventListener("dragleave", () => drop.classList.remove("over"));
document.addEventListener("drop", (event) => {
  event.preventDefault();
  drop.classList.remove("over");
  const [image] = event.dataTransfer.files;
  if (image) classify(image); else say("Error: drop an image file", true);
});
document.addEventListener("paste", (event) => {
  const [image] = event.clipboardData.files;
  if (image) classify(image); else say("Error: the clipboard has no image", true);
});

find("curl").textContent = `curl --data-binary @image.jpg ${location.origin}/predict`;
fetch("/health").then((response) => response.json()).then((about) => {
  find("model").textContent = `${about.model}: ${about.classes} classes`;
}).catch(() => say("Error: the server does not respond", true));
