// A page that is opened as a file cannot load the index of the search.
if (location.protocol === "file:") {
  document.addEventListener("DOMContentLoaded", () => {
    const field = document.querySelector("[data-md-component=search-query]");
    field.placeholder = "Search needs a server: python -m http.server -d site";
    field.disabled = true;
  });
}
