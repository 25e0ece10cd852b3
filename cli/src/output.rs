//! Text to the terminal and files to the disk: whole or not at all.

use std::{
    fs,
    io::{self, IsTerminal, Write},
    path::{Path, PathBuf},
    sync::{Mutex, PoisonError},
};

use crate::{
    Failure,
    table::{WIDTH, wrap},
};

/// Held while a file is put in its place.
static WRITING: Mutex<()> = Mutex::new(());

/// The exit code after Ctrl-C, as shells count it.
const INTERRUPTED: i32 = 130;

/// Lets Ctrl-C end the process only while no file is being written: files appear whole or not at all, and
/// nothing temporary is left.
pub fn finish_writing_when_interrupted() {
    let installed = ctrlc::set_handler(|| {
        let _written = WRITING.lock().unwrap_or_else(PoisonError::into_inner);
        std::process::exit(INTERRUPTED);
    });
    // Without a handler the process still ends at once; at worst a temporary file stays.
    drop(installed);
}

/// Writes a file by way of a temporary one beside it. Links are followed, and what is no file (a pipe,
/// `/dev/stdout`) is written to as it is.
///
/// # Errors
/// [`Failure::Write`]; whatever was at `path` before is still there then.
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

/// Whether a file could be written, before the work that it is for.
///
/// # Errors
/// [`Failure::Write`]
pub fn check_writable(path: &Path) -> Result<(), Failure> {
    let _writing = WRITING.lock().unwrap_or_else(PoisonError::into_inner);
    let possible = place(path).and_then(|place| match place {
        Place::Special => Ok(()),
        // Dropped, and so removed.
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

/// Where an output goes.
enum Place {
    /// To a file that appears whole.
    File(PathBuf),
    /// To a device or a pipe, which a file must not take the place of.
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

/// A temporary file beside `path`.
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
    // What a plainly created file would have: temporary files are private.
    #[cfg(unix)]
    builder.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o666));
    let file = builder.prefix(".tandem-").tempfile_in(directory);
    // Its own name says nothing to the reader.
    file.map_err(|error| error.kind().into())
}

/// Prints to standard output, in colour only where that is a terminal.
///
/// A reader who has seen enough (`tandem plan … | head`) ends the process quietly.
pub fn print(text: &str) {
    let mut stdout = anstream::stdout().lock();
    let printed = stdout
        .write_all(text.as_bytes())
        .and_then(|()| stdout.flush());
    if let Err(error) = printed {
        std::process::exit(i32::from(error.kind() != io::ErrorKind::BrokenPipe));
    }
}

/// Prints what went wrong to standard error; lines are broken between words for a terminal only, where a
/// person reads them.
pub fn error(failure: &Failure) {
    let mut text = failure.to_string();
    if io::stderr().is_terminal() {
        text = wrap(&text, WIDTH - "error: ".len(), "  ");
    }
    // There is nobody left to tell when this fails.
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
