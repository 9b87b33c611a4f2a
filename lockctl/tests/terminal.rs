//! The terminal is handed to the command and taken back.

use std::{
    fs::File,
    io::{Read, Write},
    os::fd::OwnedFd,
    sync::{Arc, Mutex},
};

use rustix::{
    fs::{Mode, OFlags, open},
    pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt},
};

mod stage;
use stage::{Actor, Answer, Stage, until};

/// A terminal, with a session of its own on it.
struct Terminal {
    keyboard: File,
    screen: Arc<Mutex<String>>,
    session: Actor,
}

impl Terminal {
    /// Starts a program as the leader of a session that this terminal controls.
    fn start(stage: &Stage, program: &[&str]) -> Self {
        let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
        grantpt(&master).unwrap();
        unlockpt(&master).unwrap();
        let name = ptsname(&master, Vec::new()).unwrap();
        let slave: OwnedFd = open(&*name, OFlags::RDWR | OFlags::NOCTTY, Mode::empty()).unwrap();
        let mut command = stage.program("setsid");
        command.args(["--ctty", "env", "--default-signal"]).args(program);
        command.env("LOCKCTL_STORE", stage.url()).env("TERM", "dumb").env("PS1", "$ ");
        command.stdin(slave.try_clone().unwrap());
        let session = Actor::on(command, slave);

        let (screen, mut output) = (Arc::default(), File::from(master.try_clone().unwrap()));
        let seen: Arc<Mutex<String>> = Arc::clone(&screen);
        std::thread::spawn(move || {
            let mut bytes = [0; 4096];
            // Ends with an error when the last program on the terminal is gone.
            while let Ok(length @ 1..) = output.read(&mut bytes) {
                seen.lock().unwrap().push_str(&String::from_utf8_lossy(&bytes[..length]));
            }
        });
        Self { keyboard: File::from(master), screen, session }
    }

    fn press(&mut self, keys: &str) {
        self.keyboard.write_all(keys.as_bytes()).unwrap();
    }

    fn wait_for(&self, text: &str) {
        until(&format!("{text:?} on the screen"), || {
            self.screen.lock().unwrap().contains(text).then_some(())
        });
    }

    fn end(self) -> (Answer, String) {
        let answer = self.session.end();
        let screen = self.screen.lock().unwrap().clone();
        (answer, screen)
    }
}

#[test]
fn the_command_can_read_from_the_terminal_and_so_can_the_script_afterwards() {
    let stage = Stage::new();
    let script = r#"
        "$LOCKCTL" run a -- sh -c 'read line; echo "command: $line"'
        read line; echo "script: $line""#;
    let mut terminal = Terminal::start(&stage, &["sh", "-c", script]);
    terminal.press("one\n");
    terminal.wait_for("command: one");
    terminal.press("two\n");
    terminal.wait_for("script: two");
    assert_eq!(terminal.end().0.code, 0);
}

#[test]
fn an_interrupt_from_the_keyboard_reaches_the_command() {
    let stage = Stage::new();
    let mut terminal = Terminal::start(
        &stage,
        &[env!("CARGO_BIN_EXE_lockctl"), "run", "a", "--", "sh", "-c", "echo up; sleep 600"],
    );
    terminal.wait_for("up");
    terminal.press("\x03");
    assert_eq!(terminal.end().0.code, 130);
    assert!(!stage.is_held());
}

#[test]
fn an_interrupt_from_the_keyboard_ends_the_wait() {
    let stage = Stage::new();
    let holder = stage.hold(&["--label", "web-3"]);
    let program = [env!("CARGO_BIN_EXE_lockctl"), "run", "--wait", "forever", "a", "--", "touch", "ran"];
    let mut terminal = Terminal::start(&stage, &program);
    // Somebody watches: so it says what it waits for.
    terminal.wait_for("waiting; \"a\" is held by web-3");
    terminal.press("\x03");
    assert_eq!(terminal.end().0.code, 130);
    stage.go();
    holder.end().is_silent(0);
    assert!(!stage.path("ran").exists());
}

#[test]
fn a_background_job_does_not_take_the_terminal() {
    let stage = Stage::new();
    let script = r#"
        set -m
        "$LOCKCTL" run a -- sh -c 'while [ ! -e go ]; do sleep 0.01; done' &
        while [ -z "$("$LOCKCTL" list a)" ]; do sleep 0.01; done
        read line; echo "shell: $line"; touch go; wait %1; echo "job: $?""#;
    let mut terminal = Terminal::start(&stage, &["bash", "--norc", "-c", script]);
    terminal.press("one\n");
    terminal.wait_for("shell: one");
    terminal.wait_for("job: 0");
    assert_eq!(terminal.end().0.code, 0);
}

#[test]
fn a_command_that_is_stopped_and_resumed_from_the_keyboard_goes_on() {
    let stage = Stage::new();
    let script = r#"
        set -m
        "$LOCKCTL" run a -- sh -c 'echo up; read line; echo "command: $line"'
        echo "stopped: $?"; fg; echo "resumed: $?""#;
    let mut terminal = Terminal::start(&stage, &["bash", "--norc", "-c", script]);
    terminal.wait_for("up");
    terminal.press("\x1a");
    terminal.wait_for("stopped: 148");
    terminal.press("one\n");
    terminal.wait_for("command: one");
    terminal.wait_for("resumed: 0");
    assert_eq!(terminal.end().0.code, 0);
}

#[test]
fn a_command_that_was_stopped_past_its_deadline_does_not_go_on() {
    let stage = Stage::new();
    let script = r#"
        set -m
        "$LOCKCTL" run --ttl 1s a -- sh -c 'echo up; read line; echo x > ran'
        echo "stopped: $?"
        while ! "$LOCKCTL" run --wait 50s a -- true; do :; done
        fg; echo "resumed: $?""#;
    let mut terminal = Terminal::start(&stage, &["bash", "--norc", "-c", script]);
    terminal.wait_for("up");
    terminal.press("\x1a");
    terminal.wait_for("stopped: 148");
    terminal.wait_for("resumed: 113");
    assert_eq!(terminal.end().0.code, 0);
    assert!(!stage.path("ran").exists(), "a command went on under a lease that was over");
}
