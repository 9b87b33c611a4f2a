//! The configuration file: where it is, what it says, and on which line it is wrong.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use lockcore::config::{Config, Problem, Registry};
use toml::de::{DeTable, DeValue};

use crate::{cli::StoreArgs, failure::Failure};

/// A file that was read.
#[derive(Clone, Debug)]
pub(crate) struct File {
    pub(crate) path: PathBuf,
    pub(crate) config: Config,
}

/// One thing that is wrong, with its line where that is known.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Located {
    pub(crate) line: Option<usize>,
    pub(crate) problem: Problem,
}

/// Finds the file: the one that was named, else the first that exists; never one of the working directory, which
/// another user may own.
pub(crate) fn find(args: &StoreArgs, var: impl Fn(&str) -> Option<PathBuf>) -> Option<PathBuf> {
    if let Some(named) = args.config.as_ref().filter(|path| !path.as_os_str().is_empty()) {
        return Some(named.clone());
    }
    let absolute = |name: &str| var(name).filter(|path| path.is_absolute());
    let own = absolute("XDG_CONFIG_HOME").or_else(|| Some(absolute("HOME")?.join(".config")));
    [own.map(|config| config.join("lockctl/config.toml")), Some("/etc/lockctl/config.toml".into())]
        .into_iter()
        .flatten()
        .find(|path| path.exists())
}

/// Reads a file and refuses it with everything that is wrong in it.
///
/// # Errors
/// 125, one line a problem.
pub(crate) fn load(path: &Path, registry: &Registry) -> Result<File, Failure> {
    match read(path, registry).map_err(|error| Failure::usage(cannot_read(path, &error)))? {
        (Some(config), problems) if problems.is_empty() => Ok(File { path: path.into(), config }),
        (_, problems) => {
            let lines: Vec<String> = problems.iter().map(|problem| problem.show(path)).collect();
            Err(Failure::usage(lines.join("\nlockctl: ")))
        }
    }
}

/// Says that a file cannot be read.
pub(crate) fn cannot_read(path: &Path, error: &io::Error) -> String {
    format!("cannot read the configuration file {}: {error}", path.display())
}

/// Reads a file and lists its problems. Without a configuration there is one problem: what the format says.
pub(crate) fn read(path: &Path, registry: &Registry) -> io::Result<(Option<Config>, Vec<Located>)> {
    Ok(check(&fs::read_to_string(path)?, registry))
}

fn check(text: &str, registry: &Registry) -> (Option<Config>, Vec<Located>) {
    match toml::from_str::<Config>(text) {
        Ok(config) => {
            let problems = config.problems(registry).into_iter();
            let located =
                problems.map(|problem| Located { line: line_of(text, &problem.path), problem }).collect();
            (Some(config), located)
        }
        // The message and the line, and not the text of the line, which may hold a password.
        Err(error) => {
            let line = error.span().map(|span| line_at(text, span.start));
            (None, vec![Located { line, problem: Problem::new("", error.message()) }])
        }
    }
}

impl Located {
    /// Writes it as compilers do.
    pub(crate) fn show(&self, path: &Path) -> String {
        let mut text = path.display().to_string();
        if let Some(line) = self.line {
            text.push_str(&format!(":{line}"));
        }
        text.push_str(": ");
        if !self.problem.path.is_empty() {
            text.push_str(&format!("{}: ", self.problem.path));
        }
        text + &self.problem.message
    }
}

/// Finds the line of a path like `risk.critical.backend`, or of the longest beginning of it that is in the file.
fn line_of(text: &str, path: &str) -> Option<usize> {
    let root = DeTable::parse(text).ok()?;
    let (mut table, mut found) = (root.get_ref(), None);
    for key in keys_of(path) {
        let Some((spelt, value)) = table.iter().find(|(name, _)| name.get_ref().as_ref() == key) else {
            break;
        };
        found = Some(line_at(text, spelt.span().start));
        match value.get_ref() {
            DeValue::Table(inner) => table = inner,
            _ => break,
        }
    }
    found
}

/// Splits a path at its dots, but for those in quotes.
fn keys_of(path: &str) -> Vec<String> {
    let (mut keys, mut key, mut is_quoted, mut is_escaped) = (Vec::new(), String::new(), false, false);
    for c in path.chars() {
        match c {
            _ if std::mem::take(&mut is_escaped) => key.push(c),
            '\\' if is_quoted => is_escaped = true,
            '"' => is_quoted = !is_quoted,
            '.' if !is_quoted => keys.push(std::mem::take(&mut key)),
            c => key.push(c),
        }
    }
    keys.push(key);
    keys
}

fn line_at(text: &str, offset: usize) -> usize {
    text.as_bytes()[..offset.min(text.len())].iter().filter(|byte| **byte == b'\n').count() + 1
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::registry;

    fn problems(text: &str) -> Vec<String> {
        check(text, &registry()).1.iter().map(|problem| problem.show(Path::new("f"))).collect()
    }

    #[test]
    fn every_problem_has_its_line_and_path() {
        let text = r#"
namespace = "shop"
[backend]
main = "sqlite:///var/lib/shop/locks.db"
[risk.guarded]
backend = "mian"
ttl = "30s"
[risk.critical]
backend = "main"
ttl = "15s"
[lock."a//b"]
ttl = "1s"
"#;
        let problems = problems(text);
        assert!(problems.iter().any(|p| p.starts_with("f:6: risk.guarded.backend: ")), "{problems:#?}");
        assert!(problems.iter().any(|p| p.starts_with("f:8: risk.critical.max-hold: ")), "{problems:#?}");
        assert!(problems.iter().any(|p| p.starts_with("f:11: lock.\"a//b\": ")), "{problems:#?}");
    }

    #[test]
    fn what_is_no_configuration_is_told_by_line_without_its_text() {
        let problems = problems("namespace = \"shop\"\nsecret-typo = \"s3cret\"\n");
        assert_eq!(problems.len(), 1);
        assert!(problems[0].starts_with("f:2: ") && !problems[0].contains("s3cret"), "{problems:?}");
        let (config, problems) = check("namespace = ", &registry());
        assert!(config.is_none());
        assert_eq!(problems[0].line, Some(1));
    }

    #[test]
    fn a_path_is_split_at_its_dots_but_for_quoted_ones() {
        assert_eq!(keys_of("risk.critical.backend"), ["risk", "critical", "backend"]);
        assert_eq!(keys_of(r#"lock."a.b/*".ttl"#), ["lock", "a.b/*", "ttl"]);
        assert_eq!(keys_of(r#"lock."a\"b""#), ["lock", "a\"b"]);
    }

    #[test]
    fn the_working_directory_is_never_searched() {
        let args = crate::store::tests::args(None);
        let root = tempfile::tempdir().unwrap();
        assert_eq!(
            find(&args, |name| (name == "HOME").then(|| ".".into())),
            Path::new("/etc/lockctl/config.toml").exists().then(|| "/etc/lockctl/config.toml".into())
        );
        let file = root.path().join(".config/lockctl/config.toml");
        fs::create_dir_all(file.parent().unwrap()).unwrap();
        fs::write(&file, "").unwrap();
        assert_eq!(find(&args, |name| (name == "HOME").then(|| root.path().into())), Some(file));
    }
}
