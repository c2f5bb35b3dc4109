// Before anything is drawn: the colours that were chosen here last; without a choice the system's.
(() => {
  const next = { auto: "light", light: "dark", dark: "auto" };

  function read() {
    try {
      return localStorage.getItem("offramp-theme") in next ? localStorage.getItem("offramp-theme") : "auto";
    } catch {
      return "auto"; // a browser may forbid storage
    }
  }

  function show(theme) {
    document.documentElement.dataset.theme = theme;
    const button = document.getElementById("theme");
    if (button) button.textContent = `Colours: ${theme}`;
  }

  function choose(theme) {
    show(theme);
    try {
      localStorage.setItem("offramp-theme", theme);
    } catch {
      // chosen for this visit only
    }
  }

  show(read());
  document.addEventListener("DOMContentLoaded", () => {
    show(read());
    document.getElementById("theme").addEventListener("click", () => choose(next[document.documentElement.dataset.theme]));
  });
})();
