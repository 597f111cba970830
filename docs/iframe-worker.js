// Pages that are opened from the disk may start no workers: the search then works in a hidden frame.
// The frame loads the worker's script and talks through a port, so that both sides see a Worker.
if (location.protocol === "file:") {
  window.IFrameWorker = window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.port = null;
      this.waiting = [];
      const frame = document.createElement("iframe");
      frame.hidden = true;
      addEventListener("message", (event) => {
        if (event.source !== frame.contentWindow || !event.ports.length) return;
        this.port = event.ports[0];
        this.port.onmessage = ({ data }) =>
          this.dispatchEvent(new MessageEvent("message", { data }));
        for (const data of this.waiting.splice(0)) this.port.postMessage(data);
      });
      const address = new URL(url, document.baseURI).href;
      frame.srcdoc = `<body><script>
        const { port1, port2 } = new MessageChannel();
        window.postMessage = (data) => port1.postMessage(data);
        window.importScripts = (...urls) => Promise.all(urls.map((src) => new Promise((done) =>
          document.body.append(Object.assign(document.createElement("script"), { src, onload: done })))));
        port1.onmessage = ({ data }) => dispatchEvent(new MessageEvent("message", { data }));
        addEventListener("load", () => parent.postMessage("ready", "*", [port2]));
      </script><script src="${address}"></script></body>`;
      document.body.appendChild(frame);
    }
    postMessage(data) {
      if (this.port) this.port.postMessage(data);
      else this.waiting.push(data);
    }
  };
}
