//! A headless Chromium, driven over a pipe: the page must be seen by what will show it.

use std::{
    collections::VecDeque,
    io::{BufRead, BufReader, Write},
    path::PathBuf,
    process::{Child, ChildStdin, Command, Stdio},
    sync::mpsc::{Receiver, RecvTimeoutError, channel},
    time::{Duration, Instant},
};

use serde_json::{Value, json};

/// Nothing that is awaited here takes this long.
const WATCHDOG: Duration = Duration::from_secs(60);

/// One browser with one page; its end is this value's.
pub(crate) struct Browser {
    child: Child,
    profile: PathBuf,
    to: ChildStdin,
    from: Receiver<Value>,
    /// Events that came while something else was awaited.
    events: VecDeque<Value>,
    session: Option<String>,
    last: u64,
}

impl Drop for Browser {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = std::fs::remove_dir_all(&self.profile);
    }
}

impl Browser {
    /// Starts one; `None` if `LOCK_TEST_SKIP` names chromium, which is then said.
    pub(crate) fn start(name: &str) -> Option<Self> {
        if std::env::var("LOCK_TEST_SKIP").is_ok_and(|list| list.split(',').any(|what| what == "chromium")) {
            // Past the capture of the test harness, which shows nothing of a test that did not fail.
            let line = format!("not run: {name}: LOCK_TEST_SKIP names chromium\n");
            std::io::stderr().write_all(line.as_bytes()).unwrap();
            return None;
        }
        let found =
            Command::new("chromium").arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status();
        if let Err(error) = found {
            panic!("chromium: {error}; run: sudo apt-get install chromium (or set LOCK_TEST_SKIP=chromium)");
        }
        let profile = PathBuf::from(env!("CARGO_TARGET_TMPDIR"))
            .join(format!("chromium-{name}-{}", std::process::id()));
        // The browser talks over the descriptors 3 and 4; it dies with this test.
        let mut child = Command::new("setpriv")
            .args([
                "--pdeathsig",
                "KILL",
                "sh",
                "-c",
                r#"exec "$@" 3<&0 4>&1 </dev/null >/dev/null 2>&1"#,
                "sh",
            ])
            .args([
                "chromium",
                "--headless=new",
                "--remote-debugging-pipe",
                "--no-first-run",
                "--disable-gpu",
            ])
            // Without a user of its own, as in a container, there is no sandbox; the page is our own.
            .args(["--no-sandbox", "--disable-dev-shm-usage", "--hide-scrollbars"])
            .arg(format!("--user-data-dir={}", profile.display()))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("setpriv is part of every Debian");
        let (to, answers) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
        let (tell, from) = channel();
        std::thread::spawn(move || {
            let mut answers = BufReader::new(answers);
            let mut message = Vec::new();
            while answers.read_until(0, &mut message).is_ok_and(|read| read > 0) {
                message.pop();
                let told =
                    serde_json::from_slice(&message).is_ok_and(|value: Value| tell.send(value).is_ok());
                message.clear();
                if !told {
                    return;
                }
            }
        });
        let mut browser = Self { child, profile, to, from, events: VecDeque::new(), session: None, last: 0 };
        let target = browser.call("Target.createTarget", json!({ "url": "about:blank" }));
        let attach = json!({ "targetId": target["targetId"], "flatten": true });
        let session = browser.call("Target.attachToTarget", attach);
        browser.session = session["sessionId"].as_str().map(str::to_owned);
        for domain in ["Page", "Runtime", "Log", "Network"] {
            browser.call(&format!("{domain}.enable"), json!({}));
        }
        Some(browser)
    }

    /// Calls a method of the DevTools protocol.
    pub(crate) fn call(&mut self, method: &str, parameters: Value) -> Value {
        self.last += 1;
        let id = self.last;
        let mut message = json!({ "id": id, "method": method, "params": parameters });
        if let Some(session) = &self.session {
            message["sessionId"] = session.clone().into();
        }
        let mut bytes = message.to_string().into_bytes();
        bytes.push(0);
        self.to.write_all(&bytes).and_then(|()| self.to.flush()).expect("the browser lives");
        let give_up = Instant::now() + WATCHDOG;
        loop {
            let answer = self.next(give_up, method);
            if answer["id"] == id {
                assert!(answer.get("error").is_none(), "{method}: {}", answer["error"]);
                return answer["result"].clone();
            }
            self.events.push_back(answer);
        }
    }

    fn next(&self, give_up: Instant, what: &str) -> Value {
        match self.from.recv_timeout(give_up.saturating_duration_since(Instant::now())) {
            Ok(value) => value,
            Err(RecvTimeoutError::Timeout) => panic!("waited in vain for {what}"),
            Err(RecvTimeoutError::Disconnected) => panic!("the browser ended while {what} was awaited"),
        }
    }

    /// Opens a page in a window of a size, and waits until it is there.
    pub(crate) fn open(&mut self, url: &str, width: u32, height: u32) {
        let size = json!({ "width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600 });
        self.call("Emulation.setDeviceMetricsOverride", size);
        self.call("Page.navigate", json!({ "url": url }));
        let give_up = Instant::now() + WATCHDOG;
        let is_load = |event: &Value| event["method"] == "Page.loadEventFired";
        if self.events.iter().any(is_load) {
            return;
        }
        loop {
            let event = self.next(give_up, "the page");
            let loaded = is_load(&event);
            self.events.push_back(event);
            if loaded {
                return;
            }
        }
    }

    /// Evaluates an expression in the page.
    pub(crate) fn eval(&mut self, expression: &str) -> Value {
        let asked = json!({ "expression": expression, "returnByValue": true, "awaitPromise": true });
        let answer = self.call("Runtime.evaluate", asked);
        assert!(answer.get("exceptionDetails").is_none(), "{expression}: {answer}");
        answer["result"]["value"].clone()
    }

    /// Evaluates a condition again and again until it holds.
    pub(crate) fn until(&mut self, condition: &str) {
        let give_up = Instant::now() + WATCHDOG;
        while self.eval(condition) != true {
            assert!(Instant::now() < give_up, "waited in vain until {condition}");
        }
    }

    /// Presses a key, as a keyboard would.
    pub(crate) fn press(&mut self, key: &str) {
        let code = match key {
            "Tab" => 9,
            "Enter" => 13,
            "Escape" => 27,
            "ArrowUp" => 38,
            "ArrowRight" => 39,
            "ArrowDown" => 40,
            other => panic!("no code for {other}"),
        };
        let mut down = json!({ "type": "keyDown", "key": key, "code": key, "windowsVirtualKeyCode": code });
        if key == "Enter" {
            down["text"] = "\r".into();
        }
        self.call("Input.dispatchKeyEvent", down);
        self.call(
            "Input.dispatchKeyEvent",
            json!({ "type": "keyUp", "key": key, "code": key, "windowsVirtualKeyCode": code }),
        );
    }

    /// Keeps a picture of what is seen, for people.
    pub(crate) fn picture(&mut self, name: &str) {
        let shot = self.call("Page.captureScreenshot", json!({ "format": "png" }));
        let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("page");
        std::fs::create_dir_all(&folder).unwrap();
        std::fs::write(folder.join(format!("{name}.png")), base64(shot["data"].as_str().unwrap())).unwrap();
    }

    /// Lists what went wrong in the page, and what it asked the network for.
    pub(crate) fn complaints(&mut self) -> Vec<String> {
        // An exchange, so that everything before it has been told.
        self.eval("0");
        let said = self.events.iter().filter_map(|event| {
            let parameters = &event["params"];
            match event["method"].as_str()? {
                "Runtime.exceptionThrown" => Some(parameters["exceptionDetails"].to_string()),
                "Runtime.consoleAPICalled" if parameters["type"] == "error" => {
                    Some(parameters["args"].to_string())
                }
                "Log.entryAdded" if parameters["entry"]["level"] == "error" => {
                    Some(parameters["entry"].to_string())
                }
                "Network.requestWillBeSent" => {
                    let url = parameters["request"]["url"].as_str()?;
                    let own =
                        url.starts_with("file:") && url.contains("/index.html") || url.starts_with("data:");
                    (!own).then(|| format!("asked for {url}"))
                }
                _ => None,
            }
        });
        said.collect()
    }
}

/// Decodes base64; the browser sends nothing else.
pub(crate) fn base64(text: &str) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(text.len() / 4 * 3);
    let (mut bits, mut count) = (0_u32, 0);
    for letter in text.bytes().filter(|letter| *letter != b'=') {
        let value = match letter {
            b'A'..=b'Z' => letter - b'A',
            b'a'..=b'z' => letter - b'a' + 26,
            b'0'..=b'9' => letter - b'0' + 52,
            b'+' => 62,
            _ => 63,
        };
        bits = bits << 6 | u32::from(value);
        count += 6;
        if count >= 8 {
            count -= 8;
            bytes.push((bits >> count) as u8);
            bits &= (1 << count) - 1;
        }
    }
    bytes
}
