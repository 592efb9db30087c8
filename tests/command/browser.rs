//! A browser without a window, driven through its remote debugging pipe: commands and events are JSON ended by a zero byte, on
//! file descriptors 3 and 4 of the browser.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};
use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// Patience with the browser on a busy machine.
const PATIENCE: Duration = Duration::from_secs(120);

const NAMES: [&str; 4] = ["chromium", "chromium-browser", "google-chrome", "google-chrome-stable"];

/// One page of a browser, and everything bad that was heard of it.
pub struct Browser {
    child: Child,
    to: File,
    from: Receiver<Value>,
    session: Option<String>,
    calls: u64,
    loads: usize,
    /// Of the server whose page it is; requests to it are no harm.
    server: Option<String>,
    /// Exceptions, console messages, log entries and requests that leave the page.
    pub bad: Vec<String>,
    _profile: TempDir,
}

impl Browser {
    /// The browser of this machine with an empty page; `None` where there is none.
    pub fn start() -> Option<Browser> {
        let folders = std::env::var_os("PATH")?;
        let program = std::env::split_paths(&folders)
            .flat_map(|folder| NAMES.map(|name| folder.join(name)))
            .find(|path| path.is_file())?;
        let profile = tempfile::tempdir().unwrap();
        let (their_in, to) = pipe();
        let (from, their_out) = pipe();
        let mut command = Command::new(program);
        command
            .args([
                "--headless=new",
                "--no-sandbox",
                "--disable-gpu",
                "--disable-dev-shm-usage",
                "--no-first-run",
            ])
            .args([
                "--disable-background-networking",
                "--disable-component-update",
                "--remote-debugging-pipe",
            ])
            .arg(format!("--user-data-dir={}", profile.path().display()))
            .env("HOME", profile.path())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        let ends = [their_in.as_raw_fd(), their_out.as_raw_fd()];
        // SAFETY: between fork and exec only fcntl and dup2 are called, which may be; the ends are copied out of the way first,
        // since one of them may be 3 or 4 itself.
        unsafe {
            command.pre_exec(move || {
                let away = ends.map(|fd| libc::fcntl(fd, libc::F_DUPFD_CLOEXEC, 10));
                for (fd, to) in away.into_iter().zip([3, 4]) {
                    if fd < 0 || libc::dup2(fd, to) < 0 {
                        return Err(std::io::Error::last_os_error());
                    }
                }
                Ok(())
            });
        }
        let child = command.spawn().unwrap();
        drop((their_in, their_out));
        let (to, from) = (File::from(to), listen(File::from(from)));
        let mut browser = Browser {
            child,
            to,
            from,
            session: None,
            calls: 0,
            loads: 0,
            server: None,
            bad: vec![],
            _profile: profile,
        };
        let target = browser.call("Target.createTarget", json!({"url": "about:blank"}));
        let attach = json!({"targetId": target["targetId"], "flatten": true});
        let session = browser.call("Target.attachToTarget", attach);
        browser.session = session["sessionId"].as_str().map(str::to_string);
        for domain in ["Page", "Runtime", "Log", "Network"] {
            browser.call(&format!("{domain}.enable"), json!({}));
        }
        Some(browser)
    }

    /// Opens a file and waits until it is loaded.
    pub fn open(&mut self, path: &Path) {
        self.navigate(&format!("file://{}", path.display()));
    }

    /// Opens the page at the root of a server.
    pub fn visit(&mut self, server: &str) {
        self.server = Some(server.to_string());
        self.navigate(server);
    }

    fn navigate(&mut self, url: &str) {
        let before = self.loads;
        self.call("Page.navigate", json!({"url": url}));
        while self.loads == before {
            let event = self.hear();
            self.note(&event);
        }
    }

    /// The size of the window, and whether the user likes it dark.
    pub fn look(&mut self, width: u32, height: u32, dark: bool) {
        let size = json!({"width": width, "height": height, "deviceScaleFactor": 1, "mobile": false});
        self.call("Emulation.setDeviceMetricsOverride", size);
        let scheme = if dark { "dark" } else { "light" };
        let media = json!({"features": [{"name": "prefers-color-scheme", "value": scheme}]});
        self.call("Emulation.setEmulatedMedia", media);
    }

    /// The value of an expression in the page, once what is being drawn is drawn.
    pub fn value(&mut self, expression: &str) -> Value {
        let drawn = "new Promise(r => requestAnimationFrame(() => requestAnimationFrame(r)))";
        let wrapped = format!("{drawn}.then(() => ({expression}))");
        let asked = json!({"expression": wrapped, "returnByValue": true, "awaitPromise": true});
        let answer = self.call("Runtime.evaluate", asked);
        assert!(answer["exceptionDetails"].is_null(), "{expression}: {}", answer["exceptionDetails"]);
        answer["result"]["value"].clone()
    }

    /// Waits until an expression in the page is true.
    pub fn until(&mut self, expression: &str) {
        let since = Instant::now();
        while self.value(expression) != json!(true) {
            assert!(since.elapsed() < PATIENCE, "waited in vain until {expression}: {:?}", self.bad);
        }
    }

    /// Writes a picture of the window.
    pub fn picture(&mut self, path: &Path) {
        let picture = self.call("Page.captureScreenshot", json!({"format": "png"}));
        std::fs::write(path, STANDARD.decode(picture["data"].as_str().unwrap()).unwrap()).unwrap();
    }

    /// The text of the element that a selector names.
    pub fn text(&mut self, selector: &str) -> String {
        let value = self.value(&format!("document.querySelector({}).innerText", json!(selector)));
        value.as_str().unwrap_or_default().to_string()
    }

    /// The middle of an element, scrolled into view.
    fn middle(&mut self, selector: &str) -> (f64, f64) {
        let at = self.value(&format!(
            "(e => {{ e.scrollIntoView({{block: 'nearest'}}); const r = e.getBoundingClientRect(); \
             return [r.x + r.width / 2, r.y + r.height / 2]; }})(document.querySelector({}))",
            json!(selector)
        ));
        (at[0].as_f64().unwrap(), at[1].as_f64().unwrap())
    }

    fn mouse(&mut self, what: &str, (x, y): (f64, f64)) {
        let button = if what == "mouseMoved" { "none" } else { "left" };
        let event = json!({"type": what, "x": x, "y": y, "button": button, "clickCount": 1});
        self.call("Input.dispatchMouseEvent", event);
    }

    /// Presses and releases the mouse on an element.
    pub fn click(&mut self, selector: &str) {
        let at = self.middle(selector);
        for what in ["mouseMoved", "mousePressed", "mouseReleased"] {
            self.mouse(what, at);
        }
    }

    /// Moves the mouse onto an element.
    pub fn hover(&mut self, selector: &str) {
        let at = self.middle(selector);
        self.mouse("mouseMoved", at);
    }

    /// Types text where the focus is.
    pub fn write(&mut self, text: &str) {
        self.call("Input.insertText", json!({"text": text}));
    }

    /// Presses a key by its name: `Enter`, `ArrowDown`, `/`.
    pub fn key(&mut self, key: &str) {
        let text = match key {
            "Enter" => "\r",
            k if k.len() == 1 => k,
            _ => "",
        };
        for what in ["keyDown", "keyUp"] {
            let mut event = json!({"type": what, "key": key});
            if what == "keyDown" && !text.is_empty() {
                event["text"] = json!(text);
            }
            self.call("Input.dispatchKeyEvent", event);
        }
    }

    fn call(&mut self, method: &str, params: Value) -> Value {
        self.calls += 1;
        let id = self.calls;
        let mut message = json!({"id": id, "method": method, "params": params});
        if let Some(session) = &self.session {
            message["sessionId"] = json!(session);
        }
        self.to.write_all(format!("{message}\0").as_bytes()).unwrap();
        loop {
            let heard = self.hear();
            if heard["id"] == json!(id) {
                assert!(heard["error"].is_null(), "{method}: {}", heard["error"]);
                return heard["result"].clone();
            }
            self.note(&heard);
        }
    }

    fn hear(&mut self) -> Value {
        self.from.recv_timeout(PATIENCE).expect("the browser to answer")
    }

    /// Keeps what an event says against the page.
    fn note(&mut self, event: &Value) {
        let params = &event["params"];
        match event["method"].as_str().unwrap_or_default() {
            "Page.loadEventFired" => self.loads += 1,
            "Runtime.exceptionThrown" => self.bad.push(params["exceptionDetails"].to_string()),
            "Runtime.consoleAPICalled" => self.bad.push(params.to_string()),
            "Log.entryAdded" => self.bad.push(params["entry"].to_string()),
            "Network.requestWillBeSent" => {
                let url = params["request"]["url"].as_str().unwrap_or_default();
                let own = self.server.as_ref().is_some_and(|server| url.starts_with(server));
                if !own && !url.starts_with("file:") && !url.starts_with("data:") {
                    self.bad.push(format!("a request for {url}"));
                }
            }
            _ => {}
        }
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        // Where it has ended already both fail, which is what is wanted.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Two ends of a pipe, for reading and for writing; no child inherits them.
fn pipe() -> (OwnedFd, OwnedFd) {
    let mut ends = [0; 2];
    // SAFETY: pipe2 fills both, which nobody else owns.
    unsafe {
        assert_eq!(libc::pipe2(ends.as_mut_ptr(), libc::O_CLOEXEC), 0);
        (OwnedFd::from_raw_fd(ends[0]), OwnedFd::from_raw_fd(ends[1]))
    }
}

/// Messages as they come.
fn listen(from: File) -> Receiver<Value> {
    let (send, receive) = channel();
    std::thread::spawn(move || {
        let mut from = BufReader::new(from);
        let mut bytes = Vec::new();
        while from.read_until(0, &mut bytes).is_ok_and(|n| n > 0) {
            bytes.pop();
            let Ok(message) = serde_json::from_slice(&bytes) else { break };
            if send.send(message).is_err() {
                break;
            }
            bytes.clear();
        }
    });
    receive
}
