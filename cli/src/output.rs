//! Writes text to the terminal and files to the disk; a file is written whole or not at all.

use std::{
    fs,
    io::{self, IsTerminal, Write},
    path::{Path, PathBuf},
    sync::{Mutex, PoisonError},
};

#[cfg(feature = "engine")]
use crate::table::prose;
use crate::{
    Failure,
    table::{WIDTH, visible, wrap},
};

/// Held while a file is being put in place.
static WRITING: Mutex<()> = Mutex::new(());

/// What the first Ctrl-C does instead of ending the process.
static FIRST: Mutex<Option<Box<dyn FnOnce() + Send>>> = Mutex::new(None);

/// The exit code after Ctrl-C, as in shells.
const INTERRUPTED: i32 = 130;

/// Delays Ctrl-C while a file is being written, so that files are whole or absent and no temporary file is left.
pub fn finish_writing_when_interrupted() {
    let installed = ctrlc::set_handler(|| {
        let first = FIRST.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(act) = first {
            return act();
        }
        let _written = WRITING.lock().unwrap_or_else(PoisonError::into_inner);
        std::process::exit(INTERRUPTED);
    });
    // Without a handler, Ctrl-C still ends the process at once; at worst a temporary file is left.
    drop(installed);
}

/// Lets the first Ctrl-C (or SIGTERM) from now on call `act`; the second ends the process.
#[cfg(feature = "engine")]
pub fn when_first_interrupted(act: impl FnOnce() + Send + 'static) {
    *FIRST.lock().unwrap_or_else(PoisonError::into_inner) = Some(Box::new(act));
}

/// Writes a file through a temporary file in the same directory. Links are followed. Pipes and devices such as
/// `/dev/stdout` are written directly.
///
/// # Errors
/// [`Failure::Write`]. The previous contents of `path` are then unchanged.
pub fn write_file(path: &Path, content: &[u8]) -> Result<(), Failure> {
    let _writing = WRITING.lock().unwrap_or_else(PoisonError::into_inner);
    let written = place(path).and_then(|place| match place {
        Place::Special => fs::write(path, content),
        Place::File(path) => {
            let mut file = temporary(&path)?;
            file.write_all(content)?;
            file.persist(&path).map_err(|error| error.error)?;
            Ok(())
        }
    });
    written.map_err(|error| failure(path, error))
}

/// Checks that a file could be written, before the work for it starts.
///
/// # Errors
/// [`Failure::Write`]
pub fn check_writable(path: &Path) -> Result<(), Failure> {
    let _writing = WRITING.lock().unwrap_or_else(PoisonError::into_inner);
    let possible = place(path).and_then(|place| match place {
        Place::Special => Ok(()),
        // Dropping the temporary file removes it.
        Place::File(path) => temporary(&path).map(drop),
    });
    possible.map_err(|error| failure(path, error))
}

fn failure(path: &Path, error: io::Error) -> Failure {
    Failure::Write {
        path: path.to_owned(),
        error,
    }
}

/// Destination of an output.
enum Place {
    /// A file, which is replaced as a whole.
    File(PathBuf),
    /// A device or a pipe, which a file must not replace.
    Special,
}

fn place(path: &Path) -> io::Result<Place> {
    let Ok(there) = fs::metadata(path) else {
        return Ok(Place::File(path.to_owned()));
    };
    if there.is_dir() {
        return Err(io::Error::other("it is a directory"));
    }
    if !there.is_file() {
        return Ok(Place::Special);
    }
    if there.permissions().readonly() {
        return Err(io::Error::other("it is write-protected"));
    }
    path.canonicalize().map(Place::File)
}

/// A temporary file in the directory of `path`.
fn temporary(path: &Path) -> io::Result<tempfile::NamedTempFile> {
    let directory = match path.parent() {
        Some(directory) if directory != Path::new("") => directory,
        _ => Path::new("."),
    };
    if !directory.is_dir() {
        let missing = format!("there is no directory {}", directory.display());
        return Err(io::Error::new(io::ErrorKind::NotFound, missing));
    }
    let mut builder = tempfile::Builder::new();
    // Temporary files are private by default; use the permissions of an ordinary new file.
    #[cfg(unix)]
    builder.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o666));
    let file = builder.prefix(".tandem-").tempfile_in(directory);
    // The name of the temporary file would only confuse the user.
    file.map_err(|error| error.kind().into())
}

/// Prints to standard output, in colour only if that is a terminal.
///
/// If the reader has closed the pipe (`tandem plan … | head`), the text is dropped and the run goes on: its files and
/// its exit code do not depend on the reader. If printing fails otherwise, the process ends with an error.
pub fn print(text: &str) {
    print_styled(&visible(text, true));
}

/// The same for text that contains our own colours.
pub(crate) fn print_styled(text: &str) {
    let _open = write(anstream::stdout().lock(), text);
}

/// The same for the text of a model. Only on a terminal, characters that could control it are escaped. Without a reader
/// the process ends: nobody needs the rest of the text.
#[cfg(feature = "engine")]
pub(crate) fn print_prose(text: &str) {
    let stdout = io::stdout().lock();
    let open = match stdout.is_terminal() {
        true => write(stdout, &prose(text)),
        false => write(stdout, text),
    };
    if !open {
        std::process::exit(0);
    }
}

/// Writes the text; `false` if nobody reads it.
fn write(mut stdout: impl Write, text: &str) -> bool {
    let printed = stdout
        .write_all(text.as_bytes())
        .and_then(|()| stdout.flush());
    match printed {
        Ok(()) => true,
        Err(broken) if broken.kind() == io::ErrorKind::BrokenPipe => false,
        Err(reason) => {
            error(&failure(Path::new("to standard output"), reason));
            std::process::exit(1);
        }
    }
}

/// The files of a run, which are checked before any work.
#[derive(Clone, Debug, Default)]
pub struct Files<'a> {
    inputs: Vec<&'a Path>,
    outputs: Vec<&'a Path>,
}

impl<'a> Files<'a> {
    /// No files.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds files that are read.
    #[must_use]
    pub fn reads(mut self, paths: impl IntoIterator<Item = &'a PathBuf>) -> Self {
        self.inputs.extend(paths.into_iter().map(PathBuf::as_path));
        self
    }

    /// Adds files that are written.
    #[must_use]
    pub fn writes(mut self, paths: impl IntoIterator<Item = &'a PathBuf>) -> Self {
        self.outputs.extend(paths.into_iter().map(PathBuf::as_path));
        self
    }

    /// Checks that every output can be written and that none replaces an input or another output. `force` allows such
    /// replacements.
    ///
    /// # Errors
    /// [`Failure::Write`], or [`Failure::Input`] with the two names of one file.
    pub fn check(&self, force: Force) -> Result<(), Failure> {
        for (index, &output) in self.outputs.iter().enumerate() {
            check_writable(output)?;
            if force.force {
                continue;
            }
            if let Some(input) = self.inputs.iter().find(|input| same(input, output)) {
                return Err(Failure::Input(format!(
                    "the output {} is the input {}: it would be lost; give another name, or --force",
                    output.display(),
                    input.display()
                )));
            }
            let before = &self.outputs[..index];
            if let Some(other) = before.iter().find(|other| same(other, output)) {
                return Err(Failure::Input(format!(
                    "two outputs are one file, {} and {}: give them two names, or --force to keep the last",
                    other.display(),
                    output.display()
                )));
            }
        }
        Ok(())
    }
}

/// The flag that lets outputs replace inputs or each other.
#[derive(Clone, Copy, Debug, Default, clap::Args)]
pub struct Force {
    /// Write outputs even if they replace an input or each other
    #[arg(long)]
    pub force: bool,
}

/// Whether two names refer to one file, which need not exist yet. Pipes and devices never count, because nothing is
/// lost.
fn same(a: &Path, b: &Path) -> bool {
    let kept = |path: &Path| match place(path) {
        Ok(Place::File(path)) => Some(path),
        Ok(Place::Special) | Err(_) => None,
    };
    let (Some(a), Some(b)) = (kept(a), kept(b)) else {
        return false;
    };
    one_file(&a, &b) || {
        let whole = |path: &Path| std::path::absolute(path).ok();
        let directory = |path: &Path| whole(path)?.parent()?.canonicalize().ok();
        a.file_name() == b.file_name() && directory(&a).is_some() && directory(&a) == directory(&b)
    }
}

/// Whether two names refer to one inode, as hard links do.
#[cfg(unix)]
fn one_file(a: &Path, b: &Path) -> bool {
    use std::os::unix::fs::MetadataExt;
    let inode = |path: &Path| fs::metadata(path).ok().map(|of| (of.dev(), of.ino()));
    inode(a).is_some() && inode(a) == inode(b)
}

#[cfg(not(unix))]
fn one_file(_: &Path, _: &Path) -> bool {
    false
}

/// Prints an error to standard error. Lines are wrapped only for a terminal.
pub fn error(failure: &Failure) {
    let mut text = visible(&failure.to_string(), true);
    if io::stderr().is_terminal() {
        text = wrap(&text, WIDTH - "error: ".len(), "  ");
    }
    // If this fails, there is no way to report it.
    let _ = writeln!(anstream::stderr(), "\x1b[1;31merror:\x1b[0m {text}");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_replaced_whole() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("plan.svg");
        write_file(&path, b"first").unwrap();
        write_file(&path, b"second").unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"second");
        let names: Vec<_> = std::fs::read_dir(directory.path()).unwrap().collect();
        assert_eq!(names.len(), 1, "{names:?}");
    }

    #[test]
    fn a_directory_that_is_not_there_is_named() {
        let path = Path::new("no/such/place.svg");
        for error in [write_file(path, b""), check_writable(path)] {
            assert_eq!(
                error.unwrap_err().to_string(),
                "cannot write no/such/place.svg: there is no directory no/such"
            );
        }
    }

    #[test]
    fn names_of_one_file_are_told() {
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name);
        fs::write(at("a"), "").unwrap();
        fs::create_dir(at("d")).unwrap();
        fs::hard_link(at("a"), at("hard")).unwrap();
        for (one, other, expected) in [
            ("a", "a", true),
            ("a", "d/../a", true),
            ("a", "hard", true),
            ("new", "d/../new", true),
            ("a", "d/a", false),
            ("a", "new", false),
        ] {
            assert_eq!(same(&at(one), &at(other)), expected, "{one} {other}");
        }
        let null = PathBuf::from("/dev/null");
        let (a, b) = (at("a"), at("b"));
        let files = |outputs| Files::new().reads([&a]).writes(outputs);
        let check = |outputs| files(outputs).check(Force::default());
        assert!(check(vec![&null, &null, &b]).is_ok());
        assert!(check(vec![&a]).unwrap_err().to_string().contains("--force"));
        assert!(
            check(vec![&b, &b])
                .unwrap_err()
                .to_string()
                .contains("two outputs")
        );
        assert!(files(vec![&a, &a]).check(Force { force: true }).is_ok());
    }

    #[test]
    fn what_is_protected_or_no_file_stays() {
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name);
        let refused = |path: &Path| {
            let checked = check_writable(path).unwrap_err().to_string();
            assert_eq!(write_file(path, b"new").unwrap_err().to_string(), checked);
            checked
        };
        assert!(refused(directory.path()).ends_with("it is a directory"));

        fs::write(at("kept"), b"old").unwrap();
        let mut permissions = fs::metadata(at("kept")).unwrap().permissions();
        permissions.set_readonly(true);
        fs::set_permissions(at("kept"), permissions).unwrap();
        assert!(refused(&at("kept")).ends_with("it is write-protected"));
        assert_eq!(fs::read(at("kept")).unwrap(), b"old");
    }

    #[cfg(unix)]
    #[test]
    fn links_are_followed_and_pipes_are_written_to() {
        use std::os::unix::{fs::FileTypeExt, fs::symlink};

        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name);
        fs::write(at("file"), b"old").unwrap();
        symlink(at("file"), at("link")).unwrap();
        write_file(&at("link"), b"new").unwrap();
        assert!(at("link").is_symlink());
        assert_eq!(fs::read(at("file")).unwrap(), b"new");

        let made = std::process::Command::new("mkfifo")
            .arg(at("pipe"))
            .status();
        assert!(made.unwrap().success());
        check_writable(&at("pipe")).unwrap();
        let pipe = at("pipe");
        let reader = std::thread::spawn(move || fs::read(pipe));
        write_file(&at("pipe"), b"new").unwrap();
        assert_eq!(reader.join().unwrap().unwrap(), b"new");
        let kind = fs::metadata(at("pipe")).unwrap().file_type();
        assert!(kind.is_fifo(), "a file took the place of the pipe");
    }
}
