function __heron_words
  switch "$argv"
%s
  end
end
function __heron
  set -l path
  for word in (commandline -opc)[2..]
    set -l longer $path $word
    test -n "$(__heron_words "$longer")"; and set path $longer
  end
  __heron_words "$path" | string split " "
end
complete -c heron -a "(__heron)"
