_heron_words() {
  case "$1" in
%s
  esac
}
_heron() {
  local path="" next i
  for ((i = 1; i < COMP_CWORD; i++)); do
    next="${path:+$path }${COMP_WORDS[i]}"
    [ -n "$(_heron_words "$next")" ] && path="$next"
  done
  COMPREPLY=($(compgen -W "$(_heron_words "$path")" -- "${COMP_WORDS[COMP_CWORD]}"))
}
complete -o default -F _heron heron
